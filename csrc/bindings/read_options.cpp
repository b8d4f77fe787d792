#include "read_options.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "checked_math.h"

namespace meshverse::bindings {
namespace {

// Deep enough for any options; an object that refers to itself through ever new ones ends here.
constexpr std::size_t kMaxDepth = 8;

// Types of the standard library that values are told apart by.
struct PythonTypes {
  py::object enum_type = py::module_::import("enum").attr("Enum");
  py::object timedelta = py::module_::import("datetime").attr("timedelta");
  py::object member_descriptor = py::module_::import("types").attr("MemberDescriptorType");
};

const PythonTypes& python_types() {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<PythonTypes> types;
  return types.call_once_and_store_result([] { return PythonTypes(); }).get_stored();
}

std::string type_name(py::handle type) {
  return std::string(py::str(type.attr("__module__"))) + "." +
         std::string(py::str(type.attr("__qualname__")));
}

std::string type_name_of(py::handle value) { return type_name(py::type::handle_of(value)); }

bool is_enum(py::handle value) {
  // Enums of C++ extensions need not derive from enum.Enum, but list their members as those do.
  return py::isinstance(value, python_types().enum_type) ||
         (py::hasattr(py::type::handle_of(value), "__members__") && py::hasattr(value, "name"));
}

Tagged read_enum(py::handle value) {
  const py::object name = value.attr("name");
  // A combination of flags may have no name: its value is unique then.
  const py::object text = name.is_none() ? py::repr(value.attr("value")) : py::str(name);
  return {type_name_of(value), py::str(text)};
}

OptionValue read_int(py::handle value) {
  int overflow = 0;
  const long long integer = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  if (overflow == 0) return std::int64_t{integer};
  const py::handle int_type(reinterpret_cast<PyObject*>(&PyLong_Type));
  return Tagged{"int", py::str(int_type(value))};
}

Handle make_handle(py::handle value) {
  const auto release = [](void* object) {
    if (Py_IsInitialized() == 0) return;  // nothing left to give it back to
    const py::gil_scoped_acquire gil;
    Py_DECREF(static_cast<PyObject*>(object));
  };
  Py_INCREF(value.ptr());
  return {std::shared_ptr<void>(value.ptr(), release), type_name_of(value)};
}

bool is_property(py::handle descriptor) {
  return PyObject_TypeCheck(descriptor.ptr(), &PyProperty_Type) != 0;
}

bool is_field(const py::object& class_member) {
  return is_property(class_member) ||
         py::type::handle_of(class_member).is(python_types().member_descriptor);
}

// Names of an object's data fields: properties and slots of its class, then its own attributes.
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

// Flattens a value into fields: every part under its own dotted name.
class Reader {
 public:
  explicit Reader(const std::set<std::string>& ignored) : ignored_(ignored) {}

  // Whether `object` has fields; if so, they are read under `prefix`.
  bool read_fields(py::handle object, const std::string& prefix) {
    const std::set<std::string> names = field_names(object);
    for (const std::string& name : names) {
      if (ignored_.count(prefix + name) != 0) continue;
      const py::object value = read_field(object, name, prefix + name);
      if (value) read_value(value, prefix + name);
    }
    return !names.empty();
  }

  const OptionFields& fields() const { return fields_; }

 private:
  void read_value(py::handle value, const std::string& name) {
    if (ignored_.count(name) != 0) return;
    if (value.is_none()) return add(name, None());
    if (is_enum(value)) return add(name, read_enum(value));
    if (py::isinstance<py::bool_>(value)) return add(name, value.cast<bool>());
    if (py::isinstance<py::int_>(value)) return add(name, read_int(value));
    if (py::isinstance<py::float_>(value)) return add(name, FloatBits(value.cast<double>()));
    if (py::isinstance<py::str>(value)) return add(name, value.cast<std::string>());
    if (py::isinstance<py::bytes>(value)) {
      return add(name, Tagged{"bytes", std::string(py::repr(value))});
    }
    if (py::isinstance(value, python_types().timedelta)) {
      return add(name, Tagged{"timedelta", std::to_string(to_microseconds(value)) + " us"});
    }
    read_nested(value, name);
  }

  void read_nested(py::handle value, const std::string& name) {
    const bool inside_itself = std::find(path_.begin(), path_.end(), value.ptr()) != path_.end();
    if (inside_itself || path_.size() >= kMaxDepth) {
      throw py::type_error("options field '" + name + "' of type " + type_name_of(value) +
                           (inside_itself ? " contains itself" : " is nested too deeply") +
                           ": only values nested at most " + std::to_string(kMaxDepth) +
                           " deep can be compared; add the field to `ignored`, or make it simpler");
    }
    path_.push_back(value.ptr());
    if (py::isinstance<py::list>(value) || py::isinstance<py::tuple>(value)) {
      read_sequence(value, name);
    } else if (py::isinstance<py::dict>(value)) {
      read_dict(value, name);
    } else if (py::isinstance<py::anyset>(value)) {
      read_set(value, name);
    } else if (read_fields(value, name + ".")) {
      add(name, Tagged{type_name_of(value), ""});
    } else {
      add(name, make_handle(value));
    }
    path_.pop_back();
  }

  void read_sequence(py::handle sequence, const std::string& name) {
    add(name, Tagged{py::isinstance<py::list>(sequence) ? "list" : "tuple", ""});
    std::size_t index = 0;
    for (const py::handle item : sequence) {
      read_value(item, name + "[" + std::to_string(index++) + "]");
    }
  }

  void read_dict(py::handle dict, const std::string& name) {
    add(name, Tagged{"dict", ""});
    for (const py::handle item : dict.attr("items")()) {
      const auto [key, value] = item.cast<std::pair<py::object, py::object>>();
      read_value(value, name + "[" + std::string(py::repr(key)) + "]");
    }
  }

  void read_set(py::handle set, const std::string& name) {
    add(name, Tagged{"set", ""});
    for (const py::handle item : set) {
      read_value(item, name + "{" + std::string(py::repr(item)) + "}");
    }
  }

  // The field's value; null for a slot that was never set.
  static py::object read_field(py::handle object, const std::string& name,
                               const std::string& path) {
    try {
      return object.attr(name.c_str());
    } catch (py::error_already_set& error) {
      const py::object descriptor =
          py::getattr(py::type::handle_of(object), name.c_str(), py::none());
      if (!is_property(descriptor) && error.matches(PyExc_AttributeError)) return py::object();
      const std::string message =
          "options field '" + path + "' of type " + type_name_of(object) + " cannot be read (" +
          std::string(py::str(error.type().attr("__name__"))) + ": " +
          std::string(py::str(error.value())) +
          "), so that options with it cannot be compared; set it, or add it to `ignored`";
      py::raise_from(error, PyExc_TypeError, message.c_str());
      throw py::error_already_set();
    }
  }

  void add(const std::string& name, OptionValue value) { fields_.emplace(name, std::move(value)); }

  const std::set<std::string>& ignored_;
  std::vector<PyObject*> path_;  // what is being looked into, outermost first
  OptionFields fields_;
};

void check_is_options_object(const py::object& options) {
  const bool is_class = PyType_Check(options.ptr()) != 0;
  const bool is_builtin = type_name_of(options).rfind("builtins.", 0) == 0;
  if (!is_class && !is_builtin && !py::isinstance(options, python_types().timedelta)) return;
  throw py::type_error("options " + std::string(py::repr(options)) + " of type " +
                       type_name_of(options) +
                       ": options must be an object with fields, such as "
                       "ProcessGroupNCCL.Options(); " +
                       (is_class ? "call the class to make one" : "make one and set its fields"));
}

// A fresh object of the same type; null where it takes arguments to make one.
py::object fresh_like(const py::object& options) {
  try {
    py::object fresh = py::type::of(options)();
    return fresh.is(options) ? py::object() : fresh;
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;
    return py::object();
  }
}

}  // namespace

OptionsSnapshot read_options(const py::object& options, const std::set<std::string>& ignored) {
  check_is_options_object(options);
  Reader actual(ignored);
  if (!actual.read_fields(options, "")) return {"", {{"options", make_handle(options)}}};
  const py::object fresh = fresh_like(options);
  if (!fresh) return {type_name_of(options), actual.fields()};
  Reader defaults(ignored);
  defaults.read_fields(fresh, "");
  return {"", differing_fields(actual.fields(), defaults.fields())};
}

std::int64_t to_microseconds(py::handle timedelta) {
  const auto part = [&](const char* name) { return timedelta.attr(name).cast<std::int64_t>(); };
  const std::int64_t day = checked_multiply(part("days"), 86'400'000'000, "a timeout");
  const std::int64_t rest = part("seconds") * 1'000'000 + part("microseconds");
  return checked_add(day, rest, "a timeout");
}

py::object to_timedelta(std::int64_t microseconds) {
  using namespace py::literals;
  return python_types().timedelta("microseconds"_a = microseconds);
}

}  // namespace meshverse::bindings
