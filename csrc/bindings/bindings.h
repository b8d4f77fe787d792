// What the topics of the bindings share.
#pragma once

#include <cstdint>
#include <vector>

#include <pybind11/pybind11.h>

namespace meshverse::bindings {

namespace py = pybind11;

void bind_layout(py::module_& module);
void bind_rank_map(py::module_& module);
void bind_rank_groups(py::module_& module);
void bind_options_key(py::module_& module);
void bind_group_cache(py::module_& module);

// Python integers as 64-bit ones: a sequence of them, or a single one as a sequence of one.
// `name` is what the caller knows the argument as. Raises TypeError or OverflowError.
std::vector<std::int64_t> to_integers(py::handle values, const char* name);

// A tuple of Python integers.
py::tuple to_tuple(const std::vector<std::int64_t>& values);

}  // namespace meshverse::bindings
