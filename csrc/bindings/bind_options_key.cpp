#include <set>
#include <string>
#include <utility>

#include <pybind11/operators.h>
#include <pybind11/stl.h>

#include "bindings.h"
#include "options_key.h"
#include "read_options.h"

namespace meshverse::bindings {
namespace {

using namespace py::literals;

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

OptionsKey make_key(std::string backend, const py::object& options, const py::object& timeout,
                    std::string tag, const py::object& ignored) {
  OptionsKey key;
  key.backend = std::move(backend);
  key.tag = std::move(tag);
  if (!timeout.is_none()) {
    if (!py::isinstance(timeout, py::module_::import("datetime").attr("timedelta"))) {
      throw py::type_error("timeout " + std::string(py::repr(timeout)) +
                           ": it must be a datetime.timedelta or None");
    }
    key.timeout_us = to_microseconds(timeout);
  }
  if (!options.is_none()) {
    OptionsSnapshot snapshot = read_options(options, to_names(ignored));
    key.options_type = std::move(snapshot.options_type);
    key.fields = std::move(snapshot.fields);
  }
  return key;
}

}  // namespace

void bind_options_key(py::module_& module) {
  py::class_<OptionsKey>(
      module, "OptionsKey", py::is_final(), plain_class(),
      R"(What a process group was asked to be: backend, options and isolation tag.

An immutable snapshot: changing the options later does not change the key. Made by ``of``.

>>> key = OptionsKey.of("gloo", tag="x")
>>> key
OptionsKey('gloo', tag='x')
>>> key == OptionsKey.of("gloo").with_tag("x")
True
)")
      .def(no_constructor<OptionsKey>("an OptionsKey is made by OptionsKey.of(backend, options)"))
      .def_static("of", &make_key, "backend"_a, "options"_a = py::none(), py::kw_only(),
                  "timeout"_a = py::none(), "tag"_a = "", "ignored"_a = py::tuple(),
                  R"(The key of a backend with these options.

Every property, slot and attribute of the options is read, nested ones too, by its dotted name
(``config.min_ctas``, ``devices[0]``). Only values that differ from those of a fresh object of the
same type count, so that no options and default options give one key. Objects without
fields count by identity, and the key keeps them alive.

Args:
    backend: Name of the backend.
    options: Options object of the backend, None for its defaults.
    timeout: Timeout of the group, None for the backend's own.
    tag: Keys of different tags are never equal.
    ignored: Names of fields that do not count, dotted where nested.

Raises:
    TypeError: ``options`` is no options object, or a field of it cannot be read or compared.
)")
      .def_readonly("tag", &OptionsKey::tag, "Isolation tag, empty for none.")
      .def_property_readonly(
          "digest", [](const OptionsKey& self) { return self.digest().hex(); },
          "32 hexadecimal digits, the same in every process; objects without fields count by type.")
      .def(
          "with_tag",
          [](OptionsKey self, std::string tag) {
            self.tag = std::move(tag);
            return self;
          },
          "tag"_a, "The same key with another tag.")
      .def(py::self == py::self)
      .def("__hash__", [](const OptionsKey& self) { return static_cast<py::ssize_t>(self.hash()); })
      .def("__repr__", &OptionsKey::to_string);

  module.def("is_composite", &is_composite, "value"_a, "options"_a,
             R"(Whether a key of ``options`` looks into a value in or below them, rather than at it.

It does into containers; and into objects that are data: made of their fields, none of which is a
handle; or of a type that declares data (a dataclass, a namespace, options like ``options``, a
struct of a C++ extension that can be copied). Scalars have no parts, and handles (locks, devices,
whatever holds one) count by identity.

>>> [is_composite(value, object()) for value in ([], 1, object())]
[True, False, False]
)");
  module.def("has_fields", &has_fields, "options"_a,
             "Whether an options key reads an options object by its fields, not by identity.");
  module.def(
      "fresh_like",
      [](const py::object& options) -> py::object {
        py::object fresh = fresh_like(options);
        return fresh ? std::move(fresh) : py::none();
      },
      "options"_a, "A fresh object of the same type; None where its constructor refuses.");
}

}  // namespace meshverse::bindings
