// Telling data, which options keys look into, from handles, which count by identity.
#pragma once

#include <cstddef>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <pybind11/pybind11.h>

namespace meshverse::bindings {

namespace py = pybind11;

// Deep enough for any options; an object that refers to itself through ever new ones ends here.
constexpr std::size_t kMaxDepth = 8;

// Types of the standard library that values are told apart by.
struct PythonTypes {
  py::object enum_type = py::module_::import("enum").attr("Enum");
  py::object timedelta = py::module_::import("datetime").attr("timedelta");
  py::object member_descriptor = py::module_::import("types").attr("MemberDescriptorType");
  py::object namespace_type = py::module_::import("types").attr("SimpleNamespace");
  py::object reduce = py::module_::import("builtins").attr("object").attr("__reduce_ex__");
};

const PythonTypes& python_types();

bool is_enum(py::handle value);
bool is_path(py::handle value);

// Values known by what they are: numbers, texts, enums, paths, those of this module, ...
bool is_scalar(py::handle value);

bool is_container(py::handle value);

// Names of an object's data fields: properties and slots of its class, then its own attributes.
std::set<std::string> field_names(py::handle object);

bool is_property(py::handle class_member);

// Whether a field of an object is one of its C++ part.
bool is_in_cpp(py::handle object, const std::string& name);

// Tells objects that are data from handles, in and below one options object.
//
// An object is data if it consists of its fields and none of them, however deep, is a handle; so
// what holds a lock or a connection is a handle as a whole. Dataclasses and namespaces are data
// whatever they hold. So is an object of a C++ extension in two cases:
// (a) It was read from a field of a C++ object.
// (b) Fields of its C++ part can be set; and its type can be copied, or it shares the base that has
//     these fields with the options object at the top.
class DataCheck {
 public:
  explicit DataCheck(py::object options) : options_(std::move(options)) {}

  // `in_cpp`: it was read from a field of a C++ object, or a container there.
  bool is_data(const py::object& object, bool in_cpp = false);

 private:
  bool declares_data(const py::object& type) const;
  bool is_handle_or_holds_one(const py::object& value, bool in_cpp);
  bool holds_handle(const py::object& object, const std::set<std::string>& names);
  bool any_item_holds_handle(const py::object& container, bool in_cpp);
  bool is_inside_itself(py::handle value) const;

  py::object options_;           // those at the top
  std::vector<PyObject*> path_;  // what is being looked into, outermost first
};

}  // namespace meshverse::bindings
