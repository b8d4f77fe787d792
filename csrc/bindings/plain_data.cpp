#include "plain_data.h"

#include <algorithm>
#include <utility>

#include "value_types.h"

namespace meshverse::bindings {

const PythonTypes& python_types() {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<PythonTypes> types;
  return types.call_once_and_store_result([] { return PythonTypes(); }).get_stored();
}

bool is_enum(py::handle value) {
  // Enums of C++ extensions need not derive from enum.Enum, but list their members as those do.
  return py::isinstance(value, python_types().enum_type) ||
         (py::hasattr(py::type::handle_of(value), "__members__") && py::hasattr(value, "name"));
}

bool is_path(py::handle value) { return py::hasattr(py::type::handle_of(value), "__fspath__"); }

bool is_scalar(py::handle value) {
  return value.is_none() || py::isinstance<py::int_>(value) || py::isinstance<py::float_>(value) ||
         py::isinstance<py::str>(value) || py::isinstance<py::bytes>(value) || is_enum(value) ||
         py::isinstance(value, python_types().timedelta) || is_path(value) ||
         is_value_object(value);
}

bool is_container(py::handle value) {
  return py::isinstance<py::list>(value) || py::isinstance<py::tuple>(value) ||
         py::isinstance<py::dict>(value) || py::isinstance<py::anyset>(value);
}

bool is_property(py::handle descriptor) {
  return PyObject_TypeCheck(descriptor.ptr(), &PyProperty_Type) != 0;
}

namespace {

bool is_field(const py::object& class_member) {
  return is_property(class_member) ||
         py::type::handle_of(class_member).is(python_types().member_descriptor);
}

bool is_of_cpp(py::handle class_member) {
  return is_property(class_member) && PyFunction_Check(class_member.attr("fget").ptr()) == 0;
}

// The classes among the bases of a type that have fields in C++; only those with fields that can be
// set, if so asked.
py::list cpp_classes(const py::object& type, bool settable) {
  py::list classes;
  for (const py::handle base : py::tuple(type.attr("__mro__"))) {
    for (const py::handle member : py::list(base.attr("__dict__").attr("values")())) {
      if (!is_of_cpp(member) || (settable && member.attr("fset").is_none())) continue;
      classes.append(base);
      break;
    }
  }
  return classes;
}

bool can_be_copied(const py::object& type) {
  return py::hasattr(type, "__copy__") || py::hasattr(type, "__deepcopy__") ||
         py::hasattr(type, "__setstate__");
}

// Whether an object is all in its fields, as Python's pickling finds them. Sockets, files, locks
// and most objects of C++ extensions are not: two of them with equal fields are two things.
bool is_all_in_fields(py::handle object) {
  try {
    python_types().reduce(object, 2);
    return true;
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;
    return false;
  }
}

}  // namespace

std::set<std::string> field_names(py::handle object) {
  // These have attributes, but are not made of them.
  PyObject* const pointer = object.ptr();
  if (PyModule_Check(pointer) || PyType_Check(pointer) || PyFunction_Check(pointer)) return {};
  py::dict fields;
  const py::tuple classes = py::type::handle_of(object).attr("__mro__");
  // From the most basic class but `object` on, so that what overrides a field can take it out.
  for (std::size_t i = classes.size() - 1; i-- > 0;) {
    for (const py::handle item : py::list(classes[i].attr("__dict__").attr("items")())) {
      const auto entry = py::reinterpret_borrow<py::tuple>(item);
      const py::object name = entry[0];
      if (is_field(entry[1])) {
        fields[name] = py::none();
      } else if (fields.contains(name)) {
        fields.attr("pop")(name);
      }
    }
  }
  fields.attr("update")(py::getattr(object, "__dict__", py::dict()));
  std::set<std::string> names;
  for (const auto& [name, unused] : fields) {
    auto text = name.cast<std::string>();
    if (text.rfind("__", 0) != 0) names.insert(std::move(text));
  }
  return names;
}

bool is_in_cpp(py::handle object, const std::string& name) {
  return is_of_cpp(py::getattr(py::type::handle_of(object), name.c_str(), py::none()));
}

bool DataCheck::is_data(const py::object& object, bool in_cpp) {
  const std::set<std::string> names = field_names(object);
  // What does something when it ends must not end twice.
  const bool ends_by_itself = py::hasattr(py::type::handle_of(object), "__del__");
  if (names.empty() || is_inside_itself(object) || ends_by_itself) return false;
  const py::object type = py::type::of(object);
  if (in_cpp && !cpp_classes(type, false).empty()) return true;
  return declares_data(type) || (is_all_in_fields(object) && !holds_handle(object, names));
}

bool DataCheck::declares_data(const py::object& type) const {
  const py::tuple bases = type.attr("__mro__");
  if (bases.contains(python_types().namespace_type)) return true;
  if (py::hasattr(type, "__dataclass_fields__")) return true;
  const py::list structs = cpp_classes(type, true);
  if (structs.empty()) return false;
  if (can_be_copied(type)) return true;
  const py::list options_are = cpp_classes(py::type::of(options_), true);
  return std::any_of(structs.begin(), structs.end(),
                     [&](py::handle base) { return options_are.contains(base); });
}

bool DataCheck::is_handle_or_holds_one(const py::object& value, bool in_cpp) {
  if (is_scalar(value)) return false;
  if (path_.size() >= kMaxDepth) return false;  // reading it says that this is too deep
  if (is_container(value)) return !is_inside_itself(value) && any_item_holds_handle(value, in_cpp);
  return !is_data(value, in_cpp) || holds_handle(value, field_names(value));
}

bool DataCheck::holds_handle(const py::object& object, const std::set<std::string>& names) {
  path_.push_back(object.ptr());
  const bool found = std::any_of(names.begin(), names.end(), [&](const std::string& name) {
    PyObject* const value = PyObject_GetAttrString(object.ptr(), name.c_str());
    if (value != nullptr) {
      return is_handle_or_holds_one(py::reinterpret_steal<py::object>(value),
                                    is_in_cpp(object, name));
    }
    if (PyErr_ExceptionMatches(PyExc_Exception) == 0) throw py::error_already_set();
    PyErr_Clear();  // reading it says why
    return false;
  });
  path_.pop_back();
  return found;
}

bool DataCheck::any_item_holds_handle(const py::object& container, bool in_cpp) {
  path_.push_back(container.ptr());
  py::list items(container);  // of a dict, its keys
  if (py::isinstance<py::dict>(container)) {
    items = py::list(items + py::list(container.attr("values")()));
  }
  const bool found = std::any_of(items.begin(), items.end(), [&](py::handle item) {
    return is_handle_or_holds_one(py::reinterpret_borrow<py::object>(item), in_cpp);
  });
  path_.pop_back();
  return found;
}

bool DataCheck::is_inside_itself(py::handle value) const {
  return std::find(path_.begin(), path_.end(), value.ptr()) != path_.end();
}

}  // namespace meshverse::bindings
