// What the topics of the bindings share.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <pybind11/pybind11.h>

namespace meshverse::bindings {

namespace py = pybind11;

void bind_layout(py::module_& module);
void bind_rank_map(py::module_& module);
void bind_rank_groups(py::module_& module);
void bind_options_key(py::module_& module);
void bind_group_cache(py::module_& module);

// Plain Python classes: pybind11's own metaclass adds static properties, which nothing here has.
inline py::metaclass plain_class() {
  return py::metaclass(reinterpret_cast<PyObject*>(&PyType_Type));
}

// The constructor of a class that has none: a TypeError that says how to get an object instead.
template <class Value>
auto no_constructor(const char* cure) {
  return py::init([cure](const py::args&, const py::kwargs&) -> std::unique_ptr<Value> {
    throw py::type_error(cure);
  });
}

// Python integers as 64-bit ones: a sequence of them, or a single one as a sequence of one.
// `name` is what the caller knows the argument as. Raises TypeError or OverflowError.
std::vector<std::int64_t> to_integers(py::handle values, const char* name);

// A tuple of Python integers.
py::tuple to_tuple(const std::vector<std::int64_t>& values);

}  // namespace meshverse::bindings
