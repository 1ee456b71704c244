// Errors cross from C++ to Python as a kind and a text; bindings raise the class of
// pycoll/errors.py of that name.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace pycoll {

class Error : public std::runtime_error {
 public:
  // `kind` is the name of a class in pycoll/errors.py, with static storage.
  Error(const char* kind, const std::string& text) : std::runtime_error(text), kind_(kind) {}
  const char* kind() const { return kind_; }

 private:
  const char* kind_;
};

template <typename... Parts>
[[noreturn]] void throw_error(const char* kind, const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw Error(kind, text.str());
}

// Throws `kind` with the concatenated parts unless `condition` holds.
#define COLL_CHECK(condition, kind, ...)                        \
  do {                                                          \
    if (!(condition)) ::pycoll::throw_error(kind, __VA_ARGS__); \
  } while (0)

}  // namespace pycoll
