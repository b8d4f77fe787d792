#include "read_options.h"

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "checked_math.h"
#include "handles.h"
#include "plain_data.h"
#include "value_types.h"

namespace meshverse::bindings {
namespace {

std::string type_name(py::handle type) {
  return std::string(py::str(type.attr("__module__"))) + "." +
         std::string(py::str(type.attr("__qualname__")));
}

std::string type_name_of(py::handle value) { return type_name(py::type::handle_of(value)); }

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

// What one of this module's values is told apart by.
std::string text_of(py::handle value) {
  if (!ValueType<OptionsKey>::is(value.ptr())) return py::str(value);
  return ValueType<OptionsKey>::of(value.ptr()).digest().hex();
}

Handle make_handle(py::handle value) { return {refer_to(value), type_name_of(value)}; }

// Flattens a value into fields: every part under its own dotted name.
class Reader {
 public:
  Reader(const py::object& options, const std::set<std::string>& ignored)
      : ignored_(ignored), data_check_(options) {}

  // Whether `object` has fields; if so, they are read under `prefix`.
  bool read_fields(py::handle object, const std::string& prefix) {
    const std::set<std::string> names = field_names(object);
    for (const std::string& name : names) {
      if (ignored_.count(prefix + name) != 0) continue;
      const py::object value = read_field(object, name, prefix + name);
      if (value) read_value(value, prefix + name, !is_scalar(value) && is_in_cpp(object, name));
    }
    return !names.empty();
  }

  const OptionFields& fields() const { return fields_; }

 private:
  void read_value(const py::object& value, const std::string& name, bool in_cpp = false) {
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
    if (is_path(value)) {
      return add(name, Tagged{type_name_of(value), py::str(value.attr("__fspath__")())});
    }
    if (is_value_object(value)) return add(name, Tagged{type_name_of(value), text_of(value)});
    if (!is_container(value) && !data_check_.is_data(value, in_cpp)) {
      return add(name, make_handle(value));
    }
    read_nested(value, name, in_cpp);
  }

  void read_nested(const py::object& value, const std::string& name, bool in_cpp) {
    const bool inside_itself = std::find(path_.begin(), path_.end(), value.ptr()) != path_.end();
    if (inside_itself || path_.size() >= kMaxDepth) {
      throw py::type_error("options field '" + name + "' of type " + type_name_of(value) +
                           (inside_itself ? " contains itself" : " is nested too deeply") +
                           ": only values nested at most " + std::to_string(kMaxDepth) +
                           " deep can be compared; add the field to `ignored`, or make it simpler");
    }
    path_.push_back(value.ptr());
    if (py::isinstance<py::list>(value) || py::isinstance<py::tuple>(value)) {
      read_sequence(value, name, in_cpp);
    } else if (py::isinstance<py::dict>(value)) {
      read_dict(value, name, in_cpp);
    } else if (py::isinstance<py::anyset>(value)) {
      read_set(value, name, in_cpp);
    } else {
      read_fields(value, name + ".");
      add(name, Tagged{type_name_of(value), ""});
    }
    path_.pop_back();
  }

  void read_sequence(py::handle sequence, const std::string& name, bool in_cpp) {
    add(name, Tagged{py::isinstance<py::list>(sequence) ? "list" : "tuple", ""});
    std::size_t index = 0;
    for (const py::handle item : sequence) {
      read_value(py::reinterpret_borrow<py::object>(item),
                 name + "[" + std::to_string(index++) + "]", in_cpp);
    }
  }

  void read_dict(py::handle dict, const std::string& name, bool in_cpp) {
    add(name, Tagged{"dict", ""});
    Counts seen;
    for (const py::handle item : dict.attr("items")()) {
      const auto [key, value] = item.cast<std::pair<py::object, py::object>>();
      read_value(value, name + "[" + label(key, name, seen) + "]", in_cpp);
    }
  }

  void read_set(py::handle set, const std::string& name, bool in_cpp) {
    add(name, Tagged{"set", ""});
    std::vector<py::object> items;
    for (const py::handle item : set) items.push_back(py::reinterpret_borrow<py::object>(item));
    // So that equal sets of handles are read in one order.
    std::sort(items.begin(), items.end(), [](const py::object& a, const py::object& b) {
      return std::less<PyObject*>()(a.ptr(), b.ptr());
    });
    Counts seen;
    for (const py::object& item : items) {
      if (is_known_by_repr(item)) {
        read_value(item, name + "{" + label(item, name, seen) + "}", in_cpp);
      } else {
        label(item, name, seen);
      }
    }
  }

  using Counts = std::map<std::string, int>;  // by type

  static bool is_known_by_repr(py::handle value) {
    if (!py::isinstance<py::tuple>(value)) return is_scalar(value);
    const auto items = py::reinterpret_borrow<py::tuple>(value);
    return std::all_of(items.begin(), items.end(), is_known_by_repr);
  }

  // What a dict's key or a set's item is called. What is no scalar counts by identity, and is
  // called by its type and number: its repr may tell an address, which every process has its own
  // of.
  std::string label(py::handle value, const std::string& container, Counts& seen) {
    if (is_known_by_repr(value)) return py::repr(value);
    const std::string type = type_name_of(value);
    const std::string text = "<" + type + " " + std::to_string(seen[type]++) + ">";
    add(container + text, make_handle(value));
    return text;
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
  DataCheck data_check_;
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

}  // namespace

bool is_composite(const py::object& value, const py::object& options) {
  if (is_scalar(value)) return false;
  return is_container(value) || DataCheck(options).is_data(value);
}

bool has_fields(py::handle object) { return !field_names(object).empty(); }

py::object fresh_like(const py::object& options) {
  try {
    py::object fresh = py::type::of(options)();
    return fresh.is(options) ? py::object() : fresh;
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;
    return py::object();
  }
}

OptionsSnapshot read_options(const py::object& options, const std::set<std::string>& ignored) {
  check_is_options_object(options);
  Reader actual(options, ignored);
  if (!actual.read_fields(options, "")) return {"", {{"options", make_handle(options)}}};
  const py::object fresh = fresh_like(options);
  if (!fresh) return {type_name_of(options), actual.fields()};
  Reader defaults(options, ignored);
  defaults.read_fields(fresh, "");
  return {"", differing_fields(actual.fields(), defaults.fields())};
}

std::int64_t to_microseconds(py::handle timedelta) {
  const auto part = [&](const char* name) { return timedelta.attr(name).cast<std::int64_t>(); };
  const std::int64_t day = checked_multiply(part("days"), 86'400'000'000, "a timeout");
  const std::int64_t rest = part("seconds") * 1'000'000 + part("microseconds");
  return checked_add(day, rest, "a timeout");
}

}  // namespace meshverse::bindings
