// Declarations that all topics of the bindings share.
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
void bind_reshard(py::module_& module);

// Plain Python classes: pybind11's own metaclass adds static properties, which nothing here has.
inline py::metaclass plain_class() {
  return py::metaclass(reinterpret_cast<PyObject*>(&PyType_Type));
}

// Has `Type.__new__(Type, ...)` give a finished object, which `__init__` then leaves as it is.
// Where `__init__` alone makes it, `Type.__new__(Type)` gives an object that nobody has made, and
// reading that crashes. `make` takes the class first.
template <class Type, class Make, class... Arguments>
void set_new(Type& type, Make make, const Arguments&... arguments) {
  type.attr("__new__") = py::staticmethod(py::cpp_function(make, py::arg("cls"), arguments...));
}

// For a class whose objects are made otherwise: a TypeError that says how.
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

// A Python integer as a 64-bit one. Errors as below.
std::int64_t to_integer(py::handle value, const char* name);

// A sequence of Python integers as 64-bit ones. Raises TypeError or OverflowError, with the `name`
// that the caller knows the argument by.
std::vector<std::int64_t> to_integers(py::handle values, const char* name);

// The same, where a single integer is as good as a sequence of it.
std::vector<std::int64_t> to_one_or_more_integers(py::handle values, const char* name);

// The arguments (sizes, strides=None) of a call, each an integer or a sequence of them. `format` is
// that of PyArg_ParseTupleAndKeywords: "O|O:" and the function's name.
struct SizesAndStrides {
  std::vector<std::int64_t> sizes;
  std::optional<std::vector<std::int64_t>> strides;
};
SizesAndStrides to_sizes_and_strides(PyObject* positional, PyObject* keywords, const char* format);

// The only argument of a call, by place or by `name`; `otherwise`, or a TypeError, where it is not
// given. `format` as above.
PyObject* to_argument(PyObject* positional, PyObject* keywords, const char* format,
                      const char* name, PyObject* otherwise = nullptr);

// A tuple of Python integers.
py::tuple to_tuple(const std::vector<std::int64_t>& values);

}  // namespace meshverse::bindings
