// Reading options objects of any type by reflection.
#pragma once

#include <cstdint>
#include <set>
#include <string>

#include <pybind11/pybind11.h>

#include "options_key.h"

namespace meshverse::bindings {

namespace py = pybind11;

// A snapshot of `options`: only what differs from a fresh object of its type, where its type can be
// made without arguments; else everything, with the type's name.
struct OptionsSnapshot {
  std::string options_type;
  OptionFields fields;
};

// Fields are read by dotted name; those in `ignored` are not even looked at.
// Raises TypeError for what is not an options object, and for fields that cannot be read.
OptionsSnapshot read_options(const py::object& options, const std::set<std::string>& ignored);

// Whether `read_options` looks into a value in or below `options`, rather than at it. Scalars have
// no parts, and handles count by identity.
bool is_composite(const py::object& value, const py::object& options);

bool has_fields(py::handle object);

// A fresh object of the same type; null where there is none without arguments.
py::object fresh_like(const py::object& options);

std::int64_t to_microseconds(py::handle timedelta);

}  // namespace meshverse::bindings
