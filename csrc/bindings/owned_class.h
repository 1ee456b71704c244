// Classes whose instances are not freed twice where memory ends.
//
// pybind11 enters a new instance in a table before it makes the holder. Where there is no memory
// for the entry it frees the object itself: one that a shared_ptr owns already, or without a
// destructor. Here the holder comes first. And constructors return holders (`made`): pybind11 makes
// those of other constructors where an exception of C++ ends the process.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

namespace pycoll {

template <typename T, typename... Bases>
class OwnedClass : public pybind11::class_<T, Bases..., std::shared_ptr<T>> {
 public:
  OwnedClass(pybind11::handle scope, const char* name)
      : pybind11::class_<T, Bases..., std::shared_ptr<T>>(scope, name) {
    pybind11::detail::get_type_info(typeid(T))->init_instance = init_instance;
  }

 private:
  static void init_instance(pybind11::detail::instance* self, const void* given) {
    using Holder = std::shared_ptr<T>;
    auto place = self->get_value_and_holder(pybind11::detail::get_type_info(typeid(T)));
    void* const at = std::addressof(place.template holder<Holder>());
    if (given != nullptr) {
      new (at) Holder(*static_cast<const Holder*>(given));
    } else {
      T* const value = place.template value_ptr<T>();
      place.value_ptr() = nullptr;  // a shared_ptr that cannot be made deletes it
      new (at) Holder(value);
      place.value_ptr() = value;
    }
    place.set_holder_constructed();
    pybind11::detail::register_instance(self, place.value_ptr(), place.type);
    place.set_instance_registered();
  }
};

// The constructor T(Args...).
template <typename T, typename... Args>
auto made() {
  return pybind11::init(
      [](Args... args) { return std::make_shared<T>(std::forward<Args>(args)...); });
}

}  // namespace pycoll
