#include <set>
#include <string>
#include <utility>

#include <pybind11/stl.h>

#include "bindings.h"
#include "fast_calls.h"
#include "options_key.h"
#include "read_options.h"
#include "value_types.h"

namespace meshverse::bindings {
namespace {

using namespace py::literals;

constexpr const char* kHowToMakeKey = "an OptionsKey is made by OptionsKey.of(backend, options)";

std::set<std::string> to_names(py::handle ignored) {
  if (py::isinstance<py::str>(ignored)) {
    throw py::type_error(
        "ignored " + std::string(py::repr(ignored)) +
        ": it must be a collection of field names, not one name; put it in a tuple");
  }
  std::set<std::string> names;
  for (const py::handle name : ignored) names.insert(name.cast<std::string>());
  return names;
}

OptionsKey make_key(py::handle backend, const py::object& options, py::handle timeout,
                    py::handle tag, py::handle ignored) {
  OptionsKey key;
  key.backend = to_text(backend);
  if (tag) key.tag = to_text(tag);
  if (!timeout.is_none()) {
    if (!py::isinstance(timeout, py::module_::import("datetime").attr("timedelta"))) {
      throw py::type_error("timeout " + std::string(py::repr(timeout)) +
                           ": it must be a datetime.timedelta or None");
    }
    key.timeout_us = to_microseconds(timeout);
  }
  if (!options.is_none()) {
    OptionsSnapshot snapshot =
        read_options(options, ignored ? to_names(ignored) : std::set<std::string>());
    key.options_type = std::move(snapshot.options_type);
    key.fields = std::move(snapshot.fields);
  }
  return key;
}

PyObject* key_of(PyObject* /*none*/, PyObject* positional, PyObject* keywords) {
  static const char* names[] = {"backend", "options", "timeout", "tag", "ignored", nullptr};
  PyObject *backend = nullptr, *tag = nullptr, *ignored = nullptr;
  PyObject *options = Py_None, *timeout = Py_None;
  return or_error([&] {
    if (PyArg_ParseTupleAndKeywords(positional, keywords, "O|O$OOO:of", const_cast<char**>(names),
                                    &backend, &options, &timeout, &tag, &ignored) == 0) {
      throw py::error_already_set();
    }
    return to_python(
        make_key(backend, py::reinterpret_borrow<py::object>(options), timeout, tag, ignored));
  });
}

// A field in pickled form: the kind of its value, and the value.
struct ToPickled {
  const std::string& name;

  py::tuple operator()(const Absent&) const { return py::make_tuple("absent", py::none()); }
  py::tuple operator()(const None&) const { return py::make_tuple("none", py::none()); }
  py::tuple operator()(bool value) const { return py::make_tuple("bool", value); }
  py::tuple operator()(std::int64_t value) const { return py::make_tuple("int", value); }
  py::tuple operator()(const FloatBits& value) const { return py::make_tuple("float", value.bits); }
  py::tuple operator()(const std::string& value) const {
    return py::make_tuple("text", py::bytes(value));
  }
  py::tuple operator()(const Tagged& value) const {
    return py::make_tuple(value.kind, py::bytes(value.text), true);
  }
  py::tuple operator()(const Handle& value) const {
    throw py::type_error("cannot pickle this OptionsKey: its field " + name + " is a " +
                         value.type_name +
                         ", which is known by identity, and another process has another one");
  }
};

OptionValue from_pickled(const py::tuple& pickled) {
  if (pickled.size() != 2 && pickled.size() != 3) {
    throw py::value_error("a pickled OptionsKey has a field of " + std::to_string(pickled.size()) +
                          " parts: it must have 2 or 3");
  }
  const auto kind = pickled[0].cast<std::string>();
  if (pickled.size() == 3) return Tagged{kind, pickled[1].cast<std::string>()};
  if (kind == "absent") return Absent{};
  if (kind == "none") return None{};
  if (kind == "bool") return pickled[1].cast<bool>();
  if (kind == "int") return pickled[1].cast<std::int64_t>();
  if (kind == "text") return pickled[1].cast<std::string>();
  if (kind != "float") throw py::value_error("a pickled OptionsKey has a field of kind " + kind);
  FloatBits value(0);
  value.bits = pickled[1].cast<std::uint64_t>();
  return value;
}

py::tuple to_state(const OptionsKey& key) {
  py::dict fields;
  for (const auto& [name, value] : key.fields) {
    fields[py::str(name)] = std::visit(ToPickled{name}, value);
  }
  return py::make_tuple(key.backend, key.timeout_us, key.tag, key.options_type, fields);
}

OptionsKey read_state(const py::tuple& state) {
  if (state.size() != 5) {
    throw py::value_error("a pickled OptionsKey has " + std::to_string(state.size()) +
                          " parts: it must have 5");
  }
  OptionsKey key;
  key.backend = state[0].cast<std::string>();
  key.timeout_us = state[1].cast<std::optional<std::int64_t>>();
  key.tag = state[2].cast<std::string>();
  key.options_type = state[3].cast<std::string>();
  if (!py::isinstance<py::dict>(state[4])) throw py::cast_error();
  for (const auto& [name, value] : py::reinterpret_borrow<py::dict>(state[4])) {
    if (!py::isinstance<py::tuple>(value)) throw py::cast_error();
    key.fields.emplace(name.cast<std::string>(),
                       from_pickled(py::reinterpret_borrow<py::tuple>(value)));
  }
  return key;
}

OptionsKey from_state(const py::tuple& state) {
  try {
    return read_state(state);
  } catch (const py::cast_error&) {
    throw py::value_error("a pickled OptionsKey is damaged: one of its parts has another type");
  }
}

OptionsKey key_of_state(PyObject* positional, PyObject* keywords) {
  PyObject* const state = to_argument(positional, keywords, "|O:OptionsKey", "state", Py_None);
  if (!PyTuple_Check(state)) throw py::type_error(kHowToMakeKey);
  return from_state(py::reinterpret_borrow<py::tuple>(state));
}

std::string tag_of(const OptionsKey& key) { return key.tag; }

std::string digest_of(const OptionsKey& key) { return key.digest().hex(); }

OptionsKey with_tag(const OptionsKey& key, std::string tag) {
  OptionsKey tagged = key;
  tagged.tag = std::move(tag);
  return tagged;
}

OptionsKey without_timeout(const OptionsKey& key) {
  OptionsKey timeless = key;
  timeless.timeout_us.reset();
  return timeless;
}

py::tuple reduced(const OptionsKey& key) {
  return py::make_tuple(ValueType<OptionsKey>::type(), py::make_tuple(to_state(key)));
}

py::object create_options_key() {
  static PyMethodDef methods[] = {
      {"of", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&key_of)),
       METH_VARARGS | METH_KEYWORDS | METH_STATIC,
       R"(of(backend, options=None, *, timeout=None, tag='', ignored=())
--

The key of a backend with these options.

Every property, slot and attribute of the options is read, nested ones too, by its dotted name
(``config.min_ctas``, ``devices[0]``). Only values that differ from those of a fresh object of the
same type count, so that no options and default options give one key. Objects without
fields are compared by identity, and the key keeps them alive.

Args:
    backend: Name of the backend.
    options: Options object of the backend, None for its defaults.
    timeout: Timeout of the group, None for the backend's own.
    tag: Isolation tag. Keys with different tags are never equal.
    ignored: Names of fields to ignore, dotted if nested.

Raises:
    TypeError: ``options`` is not an options object, or a field of it cannot be read or compared.
)"},
      method<&with_tag>("with_tag", R"(with_tag($self, tag, /)
--

A copy of the key with another tag.)"),
      method<&without_timeout>("without_timeout", R"(without_timeout($self, /)
--

A copy of the key without a timeout.)"),
      method<&reduced>("__reduce__", "__reduce__($self, /)\n--\n\nFor pickle."),
      {}};
  static PyGetSetDef properties[] = {
      property<&tag_of>("tag", "Isolation tag, empty for none."),
      property<&digest_of>("digest",
                           "Hash of the key: 32 hexadecimal digits, the same in every process; of "
                           "objects without fields, only the type counts."),
      {}};
  const std::vector<PyType_Slot> slots = {{Py_tp_repr, untyped(&unary<&OptionsKey::to_string>)}};
  // Only pickle calls the class, with the arguments that `__reduce__` returned.
  return ValueType<OptionsKey>::create<&key_of_state>(
      "meshverse._core.OptionsKey",
      R"(The settings that a process group was requested with: backend, options, isolation tag.

An immutable snapshot: later changes of the options do not change the key. Created by ``of``.

>>> key = OptionsKey.of("gloo", tag="x")
>>> key
OptionsKey('gloo', tag='x')
>>> key == OptionsKey.of("gloo").with_tag("x")
True
)",
      methods, properties, slots);
}

}  // namespace

void bind_options_key(py::module_& module) {
  find_python_types();
  module.attr("OptionsKey") = create_options_key();

  module.def(
      "data_in",
      [](const py::object& options, py::handle ignored) {
        return data_in(options, to_names(ignored));
      },
      "options"_a, "ignored"_a = py::tuple(),
      R"(The containers and objects whose parts a key of ``options`` reads, the options first.

Empty if the options are compared by identity or have a destructor. Everything else below them is a
scalar or a handle (a lock, a device, an object that holds one), which a copy of the options shares
with them.

Args:
    options: Options object of a backend.
    ignored: Names of fields that are not read.

Raises:
    TypeError: As ``OptionsKey.of`` does.

>>> from types import SimpleNamespace
>>> data_in(SimpleNamespace(rings=[1, 2], lock=object()))[1:]
[[1, 2]]
)");
  module.def(
      "fresh_like",
      [](const py::object& options) -> py::object {
        py::object fresh = fresh_like(options);
        return fresh ? std::move(fresh) : py::none();
      },
      "options"_a, "A new object with the default fields; None where its constructor refuses.");
}

}  // namespace meshverse::bindings
