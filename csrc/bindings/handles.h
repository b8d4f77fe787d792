// References of options keys to handles, for Python's garbage collector.
//
// Copies of a key share one reference to each handle. The collector must see each reference exactly
// once, from one owner, or it takes live objects for garbage. So each Python object that keeps a
// key (an OptionsKey or a cache) has its own references.
#pragma once

#include <memory>
#include <variant>

#include <pybind11/pybind11.h>

#include "options_key.h"

namespace meshverse::bindings {

namespace py = pybind11;

inline bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// A new reference to a Python object.
inline std::shared_ptr<void> refer_to(py::handle object) {
  const auto release = [](void* referred_to) {
    if (Py_IsInitialized() == 0) return;                     // the interpreter is gone
    if (PyGILState_Check() == 0 && is_finalizing()) return;  // taking the lock would end the thread
    const py::gil_scoped_acquire gil;
    Py_DECREF(static_cast<PyObject*>(referred_to));
  };
  Py_INCREF(object.ptr());
  return std::shared_ptr<void>(object.ptr(), release);
}

// Gives a key references of its own, which it shares with no other key.
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

// Reports to the collector the handles of a key of which the owner keeps `copies` copies. Skips a
// reference that others share at the moment: the handle then merely stays alive.
inline int traverse_handles(const OptionsKey& key, long copies, visitproc visit, void* arg) {
  for (const auto& [name, value] : key.fields) {
    const auto* const handle = std::get_if<Handle>(&value);
    if (handle == nullptr || handle->object.use_count() != copies) continue;
    Py_VISIT(static_cast<PyObject*>(handle->object.get()));
  }
  return 0;
}

}  // namespace meshverse::bindings
