// Declarations that all files of the bindings share.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <pybind11/pybind11.h>

namespace meshverse::bindings {

namespace py = pybind11;

void bind_axis_layout(py::module_& module);
void bind_layout(py::module_& module);
void bind_rank_map(py::module_& module);
void bind_rank_groups(py::module_& module);
void bind_options_key(py::module_& module);
void bind_group_cache(py::module_& module);
void bind_held_lock(py::module_& module);
void bind_reshard(py::module_& module);
void bind_ring_steps(py::module_& module);

// Releases Python's lock. Unlike pybind11's, its destructor may be left by the unwinding with which
// Python before 3.14 ends a daemon thread that asks for the lock while the interpreter ends; but
// not while an exception leaves it: that would end the process.
class Unlocked {
 public:
  Unlocked() = default;
  ~Unlocked() noexcept(false) { PyEval_RestoreThread(state_); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* const state_ = PyEval_SaveThread();
};

// Plain Python classes: pybind11's own metaclass adds static properties, which nothing here has.
inline py::metaclass plain_class() {
  return py::metaclass(reinterpret_cast<PyObject*>(&PyType_Type));
}

// Makes `Type.__new__(Type, ...)` return a finished object, which `__init__` then leaves unchanged.
// If only `__init__` constructed it, `Type.__new__(Type)` would return an object without a C++
// value, and reading that crashes. The first argument of `make` is the class.
template <class Type, class Make, class... Arguments>
void set_new(Type& type, Make make, const Arguments&... arguments) {
  type.attr("__new__") = py::staticmethod(py::cpp_function(make, py::arg("cls"), arguments...));
}

// Makes the constructor raise a TypeError that says how to create objects of the class instead.
template <class Value, class... Options>
void refuse_constructor(py::class_<Value, Options...>& type, const char* cure) {
  const auto refuse = [cure](const py::args&, const py::kwargs&) -> std::unique_ptr<Value> {
    throw py::type_error(cure);
  };
  type.def(py::init(refuse));
  type.attr("__new__") = py::staticmethod(
      py::cpp_function([cure](const py::args&, const py::kwargs&) { throw py::type_error(cure); }));
}

// A Python string as UTF-8. Raises TypeError, or UnicodeEncodeError for half a surrogate pair.
std::string to_text(py::handle value);

// A Python integer as a 64-bit one. Raises TypeError or OverflowError that names the argument.
std::int64_t to_integer(py::handle value, const char* name);

// A sequence of Python integers as 64-bit ones. Raises as to_integer() does.
std::vector<std::int64_t> to_integers(py::handle values, const char* name);

// As to_integers(), but a single integer counts as a sequence of one.
std::vector<std::int64_t> to_one_or_more_integers(py::handle values, const char* name);

// The arguments (sizes, strides=None) of a call, each an integer or a sequence of integers.
// `format` is for PyArg_ParseTupleAndKeywords: "O|O:" and the function's name.
struct SizesAndStrides {
  std::vector<std::int64_t> sizes;
  std::optional<std::vector<std::int64_t>> strides;
};
SizesAndStrides to_sizes_and_strides(PyObject* positional, PyObject* keywords, const char* format);

// The only argument of a call, positional or by `name`. If it is missing, returns `otherwise`, or
// raises a TypeError if `format`, as above, requires it.
PyObject* to_argument(PyObject* positional, PyObject* keywords, const char* format,
                      const char* name, PyObject* otherwise = nullptr);

// A tuple of Python integers.
py::tuple to_tuple(const std::vector<std::int64_t>& values);

}  // namespace meshverse::bindings
