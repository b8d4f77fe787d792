// Reading of options objects of any type by reflection, for options keys.
//
// Scalars (Python's numbers and strings, enums, paths, this module's values) are compared by value,
// also those of derived classes; containers and data by their parts, which are items, fields and
// attributes; and all other objects, called handles, by identity. Three kinds of objects are data:
// - dataclasses and namespaces, whatever they hold;
// - structs of C++ extensions with writable C++ fields: if read from a field of a C++ object, if
//   their type can be copied, or if they share the base class with these fields with the options;
// - objects that pickle reduces to their fields, if no field is or contains a handle. So an object
//   with a lock or a connection is a handle as a whole.
// An object with a destructor (`__del__`) is a handle, as it must not be destroyed twice.
#pragma once

#include <cstdint>
#include <set>
#include <string>

#include <pybind11/pybind11.h>

#include "options_key.h"

namespace meshverse::bindings {

namespace py = pybind11;

// A snapshot of options: the fields that differ from the defaults, which are those of a new object
// of the same type and, of fields of a C++ base class, those of that class; if no new object can be
// created without arguments, all fields, with the type's name.
struct OptionsSnapshot {
  std::string options_type;
  OptionFields fields;
};

// Reads all fields by their dotted names, except those in `ignored`. Raises TypeError for something
// that is not an options object, and for fields that cannot be read.
OptionsSnapshot read_options(const py::object& options, const std::set<std::string>& ignored);

// The containers and data that `read_options` reads, the options first; none if the options are
// compared by identity or have a destructor. Raises as above.
py::list data_in(const py::object& options, const std::set<std::string>& ignored);

// A new object with the default fields that a backend reads: of the C++ base class, if the type has
// a Python constructor, which may set its fields; else of the same type. Null if neither can be
// created without arguments.
py::object fresh_like(const py::object& options);

std::int64_t to_microseconds(py::handle timedelta);

// Call this once before the functions above. It may release Python's lock, so at first use a fork
// in another thread could leave it half done in the child.
void find_python_types();

}  // namespace meshverse::bindings
