#include "read_options.h"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <functional>
#include <map>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "checked_math.h"
#include "handles.h"
#include "value_types.h"

namespace meshverse::bindings {
namespace {

// Deep enough for any options; bounds the reading of objects that create new ones on each access.
constexpr std::size_t kMaxDepth = 8;

// Types of Python's standard library that distinguish kinds of values.
struct PythonTypes {
  py::object enum_type = py::module_::import("enum").attr("Enum");
  py::object timedelta = py::module_::import("datetime").attr("timedelta");
  py::object member_descriptor = py::module_::import("types").attr("MemberDescriptorType");
  py::object namespace_type = py::module_::import("types").attr("SimpleNamespace");
  py::object reduce = py::module_::import("builtins").attr("object").attr("__reduce_ex__");
};

const PythonTypes& python_types() {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<PythonTypes> types;
  return types.call_once_and_store_result([] { return PythonTypes(); }).get_stored();
}

std::string type_name_of(py::handle value) {
  const py::handle type = py::type::handle_of(value);
  return std::string(py::str(type.attr("__module__"))) + "." +
         std::string(py::str(type.attr("__qualname__")));
}

// --- scalars --------------------------------------------------------------------------------

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

// A text, which is of `type` unless that is empty. One that UTF-8 cannot encode, such as a path
// that is not in the file system's encoding, is compared by its repr.
OptionValue read_text(py::handle text, const std::string& type = "") {
  Py_ssize_t size = 0;
  if (const char* const utf8 = PyUnicode_AsUTF8AndSize(text.ptr(), &size)) {
    std::string same(utf8, static_cast<std::size_t>(size));
    if (type.empty()) return same;
    return Tagged{type, std::move(same)};
  }
  PyErr_Clear();
  const auto escaped = py::reinterpret_steal<py::str>(PyUnicode_Type.tp_repr(text.ptr()));
  if (!escaped) throw py::error_already_set();
  return Tagged{(type.empty() ? "str" : type) + ", escaped", std::string(escaped)};
}

// A scalar, compared by value; nullopt for other objects.
std::optional<OptionValue> read_scalar(py::handle value) {
  PyObject* const object = value.ptr();
  if (object == Py_None) return None();
  if (PyBool_Check(object)) return object == Py_True;
  if (PyLong_CheckExact(object)) return read_int(value);
  if (PyUnicode_CheckExact(object)) return read_text(value);
  if (PyList_CheckExact(object) || PyDict_CheckExact(object)) return std::nullopt;
  if (is_enum(value)) return read_enum(value);
  if (PyLong_Check(object)) return read_int(value);
  if (PyFloat_Check(object)) return FloatBits(PyFloat_AS_DOUBLE(object));
  if (PyUnicode_Check(object)) return read_text(value);
  if (PyBytes_Check(object)) return Tagged{"bytes", std::string(py::repr(value))};
  if (py::isinstance(value, python_types().timedelta)) {
    return Tagged{"timedelta", std::to_string(to_microseconds(value)) + " us"};
  }
  if (py::hasattr(py::type::handle_of(value), "__fspath__")) {
    return read_text(py::str(value.attr("__fspath__")()), type_name_of(value));
  }
  if (!is_value_object(value)) return std::nullopt;
  const bool is_key = ValueType<OptionsKey>::is(object);
  return Tagged{type_name_of(value), is_key ? ValueType<OptionsKey>::of(object).digest().hex()
                                            : std::string(py::str(value))};
}

// Whether the repr of a dict's key or a set's item, `depth` tuples deep in it, identifies it.
bool is_known_by_repr(py::handle value, std::size_t depth = 0) {
  if (!py::isinstance<py::tuple>(value)) return read_scalar(value).has_value();
  if (depth >= kMaxDepth) return false;
  const auto items = py::reinterpret_borrow<py::tuple>(value);
  return std::all_of(items.begin(), items.end(),
                     [&](py::handle item) { return is_known_by_repr(item, depth + 1); });
}

Handle make_handle(py::handle value) { return {refer_to(value), type_name_of(value)}; }

// --- containers and objects -----------------------------------------------------------------

bool is_container(py::handle value) {
  return py::isinstance<py::list>(value) || py::isinstance<py::tuple>(value) ||
         py::isinstance<py::dict>(value) || py::isinstance<py::anyset>(value);
}

bool is_property(py::handle class_member) {
  return PyObject_TypeCheck(class_member.ptr(), &PyProperty_Type) != 0;
}

bool is_of_cpp(py::handle class_member) {
  return is_property(class_member) && PyFunction_Check(class_member.attr("fget").ptr()) == 0;
}

// Whether a field of an object is one of its C++ part.
bool is_in_cpp(py::handle object, const std::string& name) {
  return is_of_cpp(py::getattr(py::type::handle_of(object), name.c_str(), py::none()));
}

// The (name, member) pairs of one class, without its bases.
py::list members_of(py::handle type) {
  auto* const class_type = reinterpret_cast<PyTypeObject*>(type.ptr());
#if PY_VERSION_HEX >= 0x030C0000
  const auto members = py::reinterpret_steal<py::object>(PyType_GetDict(class_type));
#else
  const auto members = py::reinterpret_borrow<py::object>(class_type->tp_dict);
#endif
  return py::reinterpret_steal<py::list>(PyDict_Items(members.ptr()));
}

// Names of an object's data fields: properties and slots of its class, then its own attributes.
std::set<std::string> field_names(py::handle object) {
  // Modules, classes and functions have attributes, but do not consist of them.
  PyObject* const pointer = object.ptr();
  if (PyModule_Check(pointer) || PyType_Check(pointer) || PyFunction_Check(pointer)) return {};
  py::dict fields;
  const auto classes = py::reinterpret_borrow<py::tuple>(Py_TYPE(pointer)->tp_mro);
  // From the most basic class (except `object`) to the type itself, so that an override can remove
  // a field.
  for (std::size_t i = classes.size() - 1; i-- > 0;) {
    for (const py::handle item : members_of(classes[i])) {
      const py::handle name = PyTuple_GET_ITEM(item.ptr(), 0);
      const py::handle member = PyTuple_GET_ITEM(item.ptr(), 1);
      if (is_property(member) || py::type::handle_of(member).is(python_types().member_descriptor)) {
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

// The classes among the bases of a type whose fields in C++ can be set.
py::list structs_of(py::handle type) {
  py::list structs;
  for (const py::handle base : py::tuple(type.attr("__mro__"))) {
    for (const py::handle item : members_of(base)) {
      const py::handle member = PyTuple_GET_ITEM(item.ptr(), 1);
      if (!is_of_cpp(member) || member.attr("fset").is_none()) continue;
      structs.append(base);
      break;
    }
  }
  return structs;
}

// Whether an object consists of its fields, as pickle finds them. Sockets, files, locks and most
// objects of C++ extensions do not: two with equal fields are different things. Nor do objects
// of classes that derive from containers other than Python's own.
bool is_all_in_fields(py::handle object) {
  try {
    const py::object reduced = python_types().reduce(object, 2);
    if (!py::isinstance<py::tuple>(reduced)) return true;
    const auto parts = py::reinterpret_borrow<py::tuple>(reduced);
    return std::all_of(parts.begin() + std::min<py::ssize_t>(parts.size(), 3), parts.end(),
                       [](py::handle items) { return items.is_none(); });
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;
    return false;
  }
}

bool ends_by_itself(py::handle object) {
  return py::hasattr(py::type::handle_of(object), "__del__");
}

enum class Kind { kHandle, kData, kDataWithoutHandles };

// --- all of them ----------------------------------------------------------------------------

// Flattens options into fields: every part under its own dotted name.
class Reader {
 public:
  Reader(py::handle options, const std::set<std::string>& ignored)
      : options_(options), ignored_(ignored) {}

  // Whether `object` has fields; if so, they are read under `prefix`.
  bool read_fields(py::handle object, const std::string& prefix) {
    const std::set<std::string> names = field_names(object);
    for (const std::string& name : names) {
      const std::string path = prefix + name;
      if (ignored_.count(path) == 0) attempt([&] { read_field(object, name, path); });
    }
    return !names.empty();
  }

  // The fields that were read. If two have one name, the second name gets a mark: no value is lost.
  OptionFields fields() {
    OptionFields fields;
    for (auto& [name, value] : fields_) {
      while (!fields.try_emplace(std::move(name), std::move(value)).second) name += "'";
    }
    return fields;
  }

  // The objects whose parts were read.
  const std::vector<py::object>& data() const { return data_; }

 private:
  // Thrown if an object turned out to be a handle, or to contain one.
  struct HandleFound {};

  // A trial reading of an object that is data unless it contains a handle. In nested trials, the
  // outermost decides.
  struct Trial {
    std::size_t depth;               // of the object in `path_`
    std::exception_ptr first_error;  // counts if the object is data
  };

  // Reads one of several parts. In a trial, an error waits until the others are read.
  template <class Read>
  void attempt(Read read) {
    if (!trial_) return read();
    const std::size_t depth = path_.size();
    try {
      return read();
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) throw;
      if (!trial_->first_error) trial_->first_error = std::current_exception();
    } catch (const std::runtime_error&) {
      if (!trial_->first_error) trial_->first_error = std::current_exception();
    }
    path_.resize(depth);
  }

  void read_field(py::handle object, const std::string& name, const std::string& path) {
    const py::object value = get_field(object, name, path);
    if (!value) return;
    if (auto scalar = read_scalar(value)) return add(path, *std::move(scalar));
    read_parts(value, path, is_in_cpp(object, name));
  }

  void read_item(const py::object& value, const std::string& name, bool in_cpp) {
    if (ignored_.count(name) != 0) return;
    if (auto scalar = read_scalar(value)) return add(name, *std::move(scalar));
    read_parts(value, name, in_cpp);
  }

  // `in_cpp`: the value was read from a field of a C++ object, or a container there.
  void read_parts(const py::object& value, const std::string& name, bool in_cpp) {
    const Kind kind = is_container(value) ? Kind::kData : kind_of(value, in_cpp);
    if (kind == Kind::kHandle) return add_handle(name, value);
    if (kind == Kind::kData || trial_) return read_nested(value, name, in_cpp);
    const std::size_t n_fields = fields_.size(), n_data = data_.size();
    trial_ = Trial{path_.size(), nullptr};
    bool is_handle = false;
    try {
      read_nested(value, name, in_cpp);
    } catch (const HandleFound&) {
      is_handle = true;
    }
    const std::exception_ptr error = trial_->first_error;
    path_.resize(trial_->depth);
    trial_.reset();
    if (is_handle) {
      fields_.resize(n_fields);
      data_.resize(n_data);
      add_handle(name, value);
    } else if (error) {
      std::rethrow_exception(error);
    }
  }

  Kind kind_of(const py::object& object, bool in_cpp) const {
    if (ends_by_itself(object) || field_names(object).empty()) return Kind::kHandle;
    const py::handle type = py::type::handle_of(object);
    if (py::tuple(type.attr("__mro__")).contains(python_types().namespace_type) ||
        py::hasattr(type, "__dataclass_fields__")) {
      return Kind::kData;
    }
    const py::list structs = structs_of(type);
    if (!structs.empty()) {
      if (in_cpp || py::hasattr(type, "__copy__") || py::hasattr(type, "__setstate__")) {
        return Kind::kData;
      }
      const py::list of_options = structs_of(py::type::handle_of(options_));
      const auto in_common = [&](py::handle base) { return of_options.contains(base); };
      if (std::any_of(structs.begin(), structs.end(), in_common)) return Kind::kData;
    }
    return is_all_in_fields(object) ? Kind::kDataWithoutHandles : Kind::kHandle;
  }

  void read_nested(const py::object& value, const std::string& name, bool in_cpp) {
    const auto found = std::find(path_.begin(), path_.end(), value.ptr());
    const bool inside_itself = found != path_.end();
    if (inside_itself && trial_) {
      const auto depth = static_cast<std::size_t>(found - path_.begin());
      if (depth <= trial_->depth || !is_container(value)) throw HandleFound();
    }
    if (inside_itself || path_.size() >= kMaxDepth) {
      throw py::type_error("options field '" + name + "' of type " + type_name_of(value) +
                           (inside_itself ? " contains itself" : " is nested too deeply") +
                           ": only values nested at most " + std::to_string(kMaxDepth) +
                           " deep can be compared; add the field to `ignored`, or make it simpler");
    }
    path_.push_back(value.ptr());
    data_.push_back(value);
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
    if (is_container(value)) read_attributes(value, name + ".");
    path_.pop_back();
  }

  // Reads the attributes that an object of a class derived from a container has besides its items.
  void read_attributes(const py::object& container, const std::string& prefix) {
    const py::object attributes = py::getattr(container, "__dict__", py::none());
    if (!py::isinstance<py::dict>(attributes)) return;
    std::set<std::string> names;
    for (const auto& [name, unused] : py::reinterpret_borrow<py::dict>(attributes)) {
      names.insert(to_text(name));
    }
    for (const std::string& name : names) {
      const std::string path = prefix + name;
      if (ignored_.count(path) == 0) attempt([&] { read_field(container, name, path); });
    }
  }

  void read_sequence(py::handle sequence, const std::string& name, bool in_cpp) {
    add(name, Tagged{py::isinstance<py::list>(sequence) ? "list" : "tuple", ""});
    std::size_t index = 0;
    for (const py::handle item : sequence) {
      const std::string path = name + "[" + std::to_string(index++) + "]";
      attempt([&] { read_item(py::reinterpret_borrow<py::object>(item), path, in_cpp); });
    }
  }

  void read_dict(py::handle dict, const std::string& name, bool in_cpp) {
    add(name, Tagged{"dict", ""});
    Counts seen;
    for (const py::handle item : dict.attr("items")()) {
      const auto [key, value] = item.cast<std::pair<py::object, py::object>>();
      attempt([&, &key = key, &value = value] {
        read_item(value, name + "[" + label(key, name, seen) + "]", in_cpp);
      });
    }
  }

  void read_set(py::handle set, const std::string& name, bool in_cpp) {
    add(name, Tagged{"set", ""});
    std::vector<py::object> items;
    for (const py::handle item : set) items.push_back(py::reinterpret_borrow<py::object>(item));
    // Sorted, so that equal sets of handles are read in the same order.
    std::sort(items.begin(), items.end(), [](const py::object& a, const py::object& b) {
      return std::less<PyObject*>()(a.ptr(), b.ptr());
    });
    Counts seen;
    for (const py::object& item : items) {
      attempt([&] {
        const std::string path = name + "{" + label(item, name, seen) + "}";
        if (is_known_by_repr(item)) read_item(item, path, in_cpp);
      });
    }
  }

  using Counts = std::map<std::string, int>;  // by type

  // Name of a dict's key or a set's item. Anything but a scalar counts by identity, and is named
  // by its type and number: its repr may contain an address, which differs between processes.
  std::string label(py::handle value, const std::string& container, Counts& seen) {
    if (is_known_by_repr(value)) return py::repr(value);
    const std::string type = type_name_of(value);
    const std::string text = "<" + type + " " + std::to_string(seen[type]++) + ">";
    add_handle(container + text, value);
    return text;
  }

  // The field's value; null for a slot that was never set.
  static py::object get_field(py::handle object, const std::string& name, const std::string& path) {
    try {
      return object.attr(name.c_str());
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) throw;
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

  void add(const std::string& name, OptionValue value) {
    fields_.emplace_back(name, std::move(value));
  }

  void add_handle(const std::string& name, py::handle value) {
    if (trial_) throw HandleFound();
    add(name, make_handle(value));
  }

  const py::handle options_;  // the outermost object
  const std::set<std::string>& ignored_;
  std::vector<std::pair<std::string, OptionValue>> fields_;
  std::vector<py::object> data_;
  std::vector<PyObject*> path_;  // objects being read, outermost first
  std::optional<Trial> trial_;
};

// The C++ class whose fields a Python constructor of the object's class may set; null if none.
py::object cpp_base_of(const py::object& options) {
  bool has_python_constructor = false;
  for (const py::handle base : py::type::of(options).attr("__mro__")) {
    const py::object constructor = base.attr("__dict__").attr("get")("__init__");
    if (constructor.is_none()) continue;
    if (PyFunction_Check(constructor.ptr()) == 0) {
      const bool is_cpp = base.ptr() != reinterpret_cast<PyObject*>(&PyBaseObject_Type);
      if (!has_python_constructor || !is_cpp) return py::object();
      return py::reinterpret_borrow<py::object>(base);
    }
    has_python_constructor = true;
  }
  return py::object();
}

// A new object of a class; null if it cannot be created without arguments.
py::object new_of(const py::object& type) {
  try {
    return type();
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;
    return py::object();
  }
}

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

py::object fresh_like(const py::object& options) {
  if (const py::object base = cpp_base_of(options)) {
    if (py::object fresh = new_of(base)) return fresh;
  }
  py::object fresh = new_of(py::type::of(options));
  return fresh && fresh.is(options) ? py::object() : fresh;
}

OptionsSnapshot read_options(const py::object& options, const std::set<std::string>& ignored) {
  check_is_options_object(options);
  Reader actual(options, ignored);
  if (!actual.read_fields(options, "")) return {"", {{"options", make_handle(options)}}};
  const py::object fresh = new_of(py::type::of(options));
  if (!fresh || fresh.is(options)) return {type_name_of(options), actual.fields()};
  Reader own_defaults(options, ignored);
  own_defaults.read_fields(fresh, "");
  OptionFields defaults = own_defaults.fields();
  // Of fields that a backend reads, the defaults are those of its class.
  if (const py::object base = cpp_base_of(options)) {
    if (const py::object fresh_base = new_of(base)) {
      Reader base_defaults(options, ignored);
      base_defaults.read_fields(fresh_base, "");
      for (const auto& [name, value] : base_defaults.fields())
        defaults.insert_or_assign(name, value);
    }
  }
  return {"", differing_fields(actual.fields(), defaults)};
}

py::list data_in(const py::object& options, const std::set<std::string>& ignored) {
  Reader reader(options, ignored);
  py::list data;
  if (!reader.read_fields(options, "") || ends_by_itself(options)) return data;
  data.append(options);
  for (const py::object& part : reader.data()) data.append(part);
  return data;
}

std::int64_t to_microseconds(py::handle timedelta) {
  const auto part = [&](const char* name) { return timedelta.attr(name).cast<std::int64_t>(); };
  const std::int64_t day = checked_multiply(part("days"), 86'400'000'000, "a timeout");
  const std::int64_t rest = part("seconds") * 1'000'000 + part("microseconds");
  return checked_add(day, rest, "a timeout");
}

void find_python_types() { python_types(); }

}  // namespace meshverse::bindings
