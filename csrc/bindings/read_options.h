// Reading options objects of any type by reflection: what an options key looks into, and what it
// looks at.
//
// Scalars (numbers, texts, enums, paths, this module's values) count by what they are, containers
// and data by their parts, all else is a handle and counts by identity. Three kinds of objects are
// data:
// - dataclasses and namespaces, whatever they hold;
// - structs of C++ extensions, whose fields in C++ can be set: if read from a field of a C++
//   object, if their type can be copied, or if they have the base with these fields in common with
//   the options;
// - objects that consist of their fields, as pickle finds them, none of which is or holds a handle.
//   So what holds a lock or a connection is a handle as a whole.
// An object with a destructor (`__del__`) is a handle, as it must not be destroyed twice.
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

// The containers and data that `read_options` looks into, the options first; none where they count
// by identity, or must not end twice. Raises as above.
py::list data_in(const py::object& options, const std::set<std::string>& ignored);

// A fresh object of the same type; null where there is none without arguments.
py::object fresh_like(const py::object& options);

std::int64_t to_microseconds(py::handle timedelta);

}  // namespace meshverse::bindings
