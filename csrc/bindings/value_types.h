// Python types of C++ values: immutable, compared and hashed by content.
//
// An object contains its value. pybind11's objects contain a pointer and are registered in a table,
// which costs more than most uses of a value.
#pragma once

#include <cstddef>
#include <new>
#include <string>
#include <structmember.h>
#include <type_traits>
#include <utility>
#include <vector>
#ifdef __GLIBCXX__
#include <cxxabi.h>
#endif

#include "bindings.h"
#include "handles.h"
#include "layout.h"
#include "options_key.h"

namespace meshverse::bindings {

// Returns the result of body() as a new reference; if it throws, null, with Python's error set.
template <class Body>
PyObject* or_error(Body&& body) {
  try {
    return py::object(body()).release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
#ifdef __GLIBCXX__
  } catch (abi::__forced_unwind&) {  // Python ends a daemon thread: glibc aborts if it is caught
    throw;
#endif
  } catch (...) {
    py::detail::try_translate_exceptions();
  }
  return nullptr;
}

template <class Value>
constexpr bool is_value = std::is_same_v<Value, AxisLayout> || std::is_same_v<Value, Layout> ||
                          std::is_same_v<Value, OptionsKey>;

// Whether such a value may refer to Python objects, and so be part of a reference cycle.
template <class Value>
constexpr bool has_references = std::is_same_v<Value, OptionsKey>;

// A function as an entry of a type's slots.
template <class Function>
void* untyped(Function* function) {
  return reinterpret_cast<void*>(function);
}

// The Python type of `Value`. Nobody can derive from it.
template <class Value>
class ValueType {
 public:
  // Creates the value of `Type(...)` from its positional and keyword arguments.
  using Constructor = Value (*)(PyObject* positional, PyObject* keywords);

  // Creates the type with the name `module.Type`. The tables must end with {} and live as long as
  // the type. A process has one such type: if another interpreter of the process loads the module
  // again, it gets the same type.
  template <Constructor construct>
  static py::object create(const char* name, const char* doc, PyMethodDef* methods,
                           PyGetSetDef* properties, std::vector<PyType_Slot> slots) {
    if (type_ != nullptr) return type();
    static PyMemberDef members[] = {
        {"__weaklistoffset__", T_PYSSIZET, offsetof(Head, weak_references), READONLY, nullptr},
        {nullptr, 0, 0, 0, nullptr}};
    const std::vector<PyType_Slot> common = {{Py_tp_new, untyped(&new_object<construct>)},
                                             {Py_tp_dealloc, untyped(&destroy)},
                                             {Py_tp_hash, untyped(&hash)},
                                             {Py_tp_richcompare, untyped(&compare)},
                                             {Py_tp_doc, const_cast<char*>(doc)},
                                             {Py_tp_methods, methods},
                                             {Py_tp_getset, properties},
                                             {Py_tp_members, members},
                                             {0, nullptr}};
    unsigned int flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE;
    if constexpr (has_references<Value>) {
      flags |= Py_TPFLAGS_HAVE_GC;
      // No tp_clear, as for tuples: a value refers only to objects that are older than it. So a
      // cycle was closed by a change of another object in it, and Python clears that one.
      slots.push_back({Py_tp_traverse, untyped(&traverse)});
    }
    slots.insert(slots.end(), common.begin(), common.end());
    PyType_Spec spec = {name, sizeof(Object), 0, flags, slots.data()};
    auto made = py::reinterpret_steal<py::object>(PyType_FromSpec(&spec));
    if (!made) throw py::error_already_set();
    type_ = reinterpret_cast<PyTypeObject*>(made.inc_ref().ptr());
    return made;
  }

  static py::object type() {
    return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(type_));
  }

  // A new object.
  static py::object make(Value value) {
    static_assert(std::is_nothrow_move_constructible_v<Value>);
    if constexpr (has_references<Value>) own_references(value);
    PyObject* self = allocate();
    if (self == nullptr) throw py::error_already_set();
    new (&reinterpret_cast<Object*>(self)->value) Value(std::move(value));
    if constexpr (has_references<Value>) {
      if (has_handles(of(self))) PyObject_GC_Track(self);
    }
    return py::reinterpret_steal<py::object>(self);
  }

  static bool is(PyObject* object) { return Py_TYPE(object) == type_; }

  // The value of an object that is one.
  static const Value& of(PyObject* object) { return reinterpret_cast<Object*>(object)->value; }

  // The value of an argument; TypeError if it is something else.
  static const Value& from(PyObject* given) {
    if (!is(given)) {
      throw py::type_error(std::string(py::repr(given)) + " of type " + Py_TYPE(given)->tp_name +
                           ", where a " + type_->tp_name + " has to be");
    }
    return of(given);
  }

 private:
  struct Head {
    PyObject object;
    PyObject* weak_references;
  };
  struct Object {
    Head head;
    Value value;
  };

  template <Constructor construct>
  static PyObject* new_object(PyTypeObject* /*type*/, PyObject* positional, PyObject* keywords) {
    return or_error([&] { return make(construct(positional, keywords)); });
  }

  // An object without its value, not yet tracked by the garbage collector.
  static PyObject* allocate() {
    if constexpr (has_references<Value>) {
      Object* const object = PyObject_GC_New(Object, type_);
      if (object == nullptr) return nullptr;
      object->head.weak_references = nullptr;
      return reinterpret_cast<PyObject*>(object);
    } else {
      return type_->tp_alloc(type_, 0);
    }
  }

  static int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    return traverse_handles(of(self), 1, visit, arg);
  }

  static void destroy(PyObject* self) {
    PyTypeObject* const type = Py_TYPE(self);
    if constexpr (has_references<Value>) PyObject_GC_UnTrack(self);
    PyObject_ClearWeakRefs(self);
    reinterpret_cast<Object*>(self)->value.~Value();
    type->tp_free(self);
    Py_DECREF(type);
  }

  static Py_hash_t hash(PyObject* self) {
    const auto hash = static_cast<Py_hash_t>(of(self).hash());
    return hash == -1 ? -2 : hash;  // -1 stands for an error
  }

  static PyObject* compare(PyObject* self, PyObject* other, int comparison) {
    if (!is(other) || (comparison != Py_EQ && comparison != Py_NE)) Py_RETURN_NOTIMPLEMENTED;
    return PyBool_FromLong((of(self) == of(other)) == (comparison == Py_EQ));
  }

  static inline PyTypeObject* type_ = nullptr;
};

// Whether an object is one of these values.
inline bool is_value_object(py::handle object) {
  return ValueType<AxisLayout>::is(object.ptr()) || ValueType<Layout>::is(object.ptr()) ||
         ValueType<OptionsKey>::is(object.ptr());
}

}  // namespace meshverse::bindings

// Lets pybind11's functions take and return these values.
namespace pybind11::detail {

template <class Value>
struct value_caster {
  bool load(handle given, bool /*convert*/) {
    if (!meshverse::bindings::ValueType<Value>::is(given.ptr())) return false;
    value_ = &meshverse::bindings::ValueType<Value>::of(given.ptr());
    return true;
  }

  template <class>
  using cast_op_type = const Value&;
  operator const Value&() const { return *value_; }

  static handle cast(Value value, return_value_policy /*policy*/, handle /*parent*/) {
    return meshverse::bindings::ValueType<Value>::make(std::move(value)).release();
  }

 private:
  const Value* value_ = nullptr;
};

template <>
struct type_caster<meshverse::AxisLayout> : value_caster<meshverse::AxisLayout> {
  static constexpr auto name = const_name("AxisLayout");
};
template <>
struct type_caster<meshverse::Layout> : value_caster<meshverse::Layout> {
  static constexpr auto name = const_name("Layout");
};
template <>
struct type_caster<meshverse::OptionsKey> : value_caster<meshverse::OptionsKey> {
  static constexpr auto name = const_name("OptionsKey");
};

}  // namespace pybind11::detail
