#include "bindings/calls/python_frame.h"

#include <unordered_map>

#include "bindings/owned_class.h"

namespace py = pybind11;
namespace pycoll {
namespace {

class ProgramPlaces {
 public:
  uint32_t find() {
    bool known = true;
    const CodePlace place = place_outside([&](PyObject* code) {
      const auto found = codes_.find(code);
      known = found != codes_.end();
      return known && found->second.inside;
    });
    if (!known || !place.code) return 0;
    const KnownPlace& entry = places_[place];
    return entry.is(place) ? entry.number : 0;
  }

  void learn(const py::object& code, bool inside) {
    if (codes_.size() >= kMost) codes_.clear();  // code that is made and run again and again
    codes_[code.ptr()] = {code, inside};
  }

  void number(const py::object& code, int lasti, uint32_t number) {
    const CodePlace place{code, lasti};
    places_[place] = {place, number};
  }

 private:
  struct Known {
    py::object code;
    bool inside = false;
  };
  static constexpr size_t kMost = 4096;
  std::unordered_map<PyObject*, Known> codes_;
  KnownPlaces places_;
};

}  // namespace

void bind_program_places(py::module_& m) {
  OwnedClass<ProgramPlaces>(m, "ProgramPlaces")
      .def(made<ProgramPlaces>())
      .def("find", &ProgramPlaces::find)
      .def("learn", &ProgramPlaces::learn)
      .def("number", &ProgramPlaces::number);
}

}  // namespace pycoll
