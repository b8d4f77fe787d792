#include "bindings.h"
#include "value_types.h"

namespace meshverse::bindings {
namespace {

// A lock of Python's, held for one `with` block. Taking the lock and noting that it is held are one
// call of C: no signal handler runs in between.
struct HeldLock {
  PyObject_HEAD PyObject* lock;
  bool is_held;
};

HeldLock& held_lock(PyObject* self) { return *reinterpret_cast<HeldLock*>(self); }

PyObject* create(PyTypeObject* type, PyObject* positional, PyObject* keywords) {
  return or_error([&] {
    PyObject* lock = to_argument(positional, keywords, "O:HeldLock", "lock");
    auto self = py::reinterpret_steal<py::object>(type->tp_alloc(type, 0));
    if (!self) throw py::error_already_set();
    Py_INCREF(lock);
    held_lock(self.ptr()).lock = lock;
    return self;
  });
}

PyObject* enter(PyObject* self, PyObject* /*unused*/) {
  PyObject* taken = PyObject_CallMethod(held_lock(self).lock, "acquire", nullptr);
  if (taken == nullptr) return nullptr;
  held_lock(self).is_held = true;
  Py_DECREF(taken);
  Py_RETURN_NONE;
}

PyObject* release(PyObject* self) {
  held_lock(self).is_held = false;
  return PyObject_CallMethod(held_lock(self).lock, "release", nullptr);
}

PyObject* leave(PyObject* self, PyObject* const* /*exception*/, Py_ssize_t /*n*/) {
  PyObject* released = release(self);
  if (released == nullptr) return nullptr;
  Py_DECREF(released);
  Py_RETURN_NONE;
}

void destroy(PyObject* self) {
  if (held_lock(self).is_held) {
    const py::error_scope kept;  // that with which the block was left
    PyObject* released = release(self);
    if (released == nullptr) PyErr_WriteUnraisable(held_lock(self).lock);  // not `self`: it ends
    Py_XDECREF(released);
  }
  Py_XDECREF(held_lock(self).lock);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

constexpr const char* kDoc = R"(HeldLock(lock)
--

A lock, held for one ``with`` block, and no longer than this object lives.

Python 3.14 may run a signal handler when ``with lock:`` has taken the lock and its block has not yet
begun. If that handler raises, nothing frees the lock. In ``with HeldLock(lock):``, this object does,
as it is then deleted. Source: https://github.com/python/cpython/issues/148874.

Args:
    lock: What has methods ``acquire()`` and ``release()`` in C, as locks of :mod:`threading` do.

>>> import threading
>>> lock = threading.Lock()
>>> with HeldLock(lock):
...     lock.locked()
True
>>> lock.locked()
False
)";

}  // namespace

void bind_held_lock(py::module_& module) {
  // Cast via a function type without arguments: the compiler warns of any other cast.
  auto* const leave_untyped = reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&leave));
  static PyMethodDef methods[] = {{"__enter__", &enter, METH_NOARGS, nullptr},
                                  {"__exit__", leave_untyped, METH_FASTCALL, nullptr},
                                  {}};
  PyType_Slot slots[] = {{Py_tp_new, untyped(&create)},
                         {Py_tp_dealloc, untyped(&destroy)},
                         {Py_tp_doc, const_cast<char*>(kDoc)},
                         {Py_tp_methods, methods},
                         {0, nullptr}};
  PyType_Spec spec = {"meshverse._core.HeldLock", sizeof(HeldLock), 0,
                      Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE, slots};
  auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
  if (!type) throw py::error_already_set();
  module.attr("HeldLock") = type;
}

}  // namespace meshverse::bindings
