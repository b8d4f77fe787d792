// The handles of options keys as Python's garbage collector sees them: references that an owner has
// to itself.
//
// Copies of a key share one reference to each handle. The collector must learn of a reference
// once, from its owner, or it takes live objects for garbage. So whatever Python can reach and
// keeps a key, an OptionsKey object or a cache, has references of its own.
#pragma once

#include <memory>
#include <variant>

#include <pybind11/pybind11.h>

#include "options_key.h"

namespace meshverse::bindings {

namespace py = pybind11;

// A new reference to a Python object.
inline std::shared_ptr<void> refer_to(py::handle object) {
  const auto release = [](void* referred_to) {
    if (Py_IsInitialized() == 0) return;  // nothing left to give it back to
    const py::gil_scoped_acquire gil;
    Py_DECREF(static_cast<PyObject*>(referred_to));
  };
  Py_INCREF(object.ptr());
  return std::shared_ptr<void>(object.ptr(), release);
}

// Has a key share its references with no other key.
inline void own_references(OptionsKey& key) {
  for (auto& [name, value] : key.fields) {
    auto* const handle = std::get_if<Handle>(&value);
    if (handle == nullptr || handle->object.use_count() == 1) continue;
    handle->object = refer_to(static_cast<PyObject*>(handle->object.get()));
  }
}

inline bool has_handles(const OptionsKey& key) {
  for (const auto& [name, value] : key.fields) {
    if (std::holds_alternative<Handle>(value)) return true;
  }
  return false;
}

// Tells the collector of the handles of a key that its owner keeps in so many copies. Says nothing
// of a reference that others share at the moment, which only has the handle live on.
inline int traverse_handles(const OptionsKey& key, long copies, visitproc visit, void* arg) {
  for (const auto& [name, value] : key.fields) {
    const auto* const handle = std::get_if<Handle>(&value);
    if (handle == nullptr || handle->object.use_count() != copies) continue;
    Py_VISIT(static_cast<PyObject*>(handle->object.get()));
  }
  return 0;
}

}  // namespace meshverse::bindings
