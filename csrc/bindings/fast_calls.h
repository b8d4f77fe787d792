// C++ functions as methods that Python calls without pybind11 in between.
//
// pybind11 looks up the C++ object behind an argument, and the function to call, in tables. If
// these are not in the processor's caches, the first call takes 20 us, more than most functions
// here. Functions that every mesh calls avoid that; all others go through pybind11.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings.h"
#include "value_types.h"

namespace meshverse::bindings {

// --- from C++ to Python ---

inline py::object to_python(py::object value) { return value; }
inline py::object to_python(bool value) { return py::bool_(value); }
inline py::object to_python(std::int64_t value) { return py::int_(value); }
inline py::object to_python(const std::string& value) { return py::str(value); }
inline py::object to_python(const std::vector<std::int64_t>& values) { return to_tuple(values); }

template <class Value>
std::enable_if_t<is_value<Value>, py::object> to_python(Value value) {
  return ValueType<Value>::make(std::move(value));
}

template <class Value>
py::object to_python(std::optional<Value> value) {
  return value ? to_python(*std::move(value)) : py::none();
}

// --- from Python to C++ ---

// The C++ object behind `self`, an instance of the method's class.
template <class Object>
Object& self_of(PyObject* self) {
  using Value = std::remove_const_t<Object>;
  if constexpr (is_value<Value>) {
    return ValueType<Value>::of(self);
  } else {
    auto* instance = reinterpret_cast<py::detail::instance*>(self);
    Value* object = instance->get_value_and_holder().template value_ptr<Value>();
    if (object == nullptr) throw py::type_error("this object was never made");
    return *object;
  }
}

// An argument: an integer, a string, a value, or any Python object as a handle.
template <class Argument>
decltype(auto) from_python(PyObject* given) {
  if constexpr (std::is_same_v<Argument, py::handle>) {
    return py::handle(given);
  } else if constexpr (std::is_same_v<Argument, std::int64_t>) {
    return to_integer(given, "arguments");
  } else if constexpr (std::is_same_v<Argument, std::string>) {
    return to_text(given);
  } else {
    return ValueType<std::decay_t<Argument>>::from(given);
  }
}

// --- the call ---

// The types of the object and of the other arguments, for const member functions and for functions
// whose first argument is the object.
template <class Function>
struct Signature;
template <class Result, class Self, class... Arguments>
struct Signature<Result (Self::*)(Arguments...) const> {
  using Object = const Self;
  using Given = std::tuple<Arguments...>;
};
template <class Result, class Self, class... Arguments>
struct Signature<Result (*)(Self&, Arguments...)> {
  using Object = Self;
  using Given = std::tuple<Arguments...>;
};

template <auto function, std::size_t... i>
PyObject* call_with(PyObject* self, PyObject* const* given, std::index_sequence<i...>) {
  using Function = Signature<decltype(function)>;
  return or_error([&] {
    return to_python(
        std::invoke(function, self_of<typename Function::Object>(self),
                    from_python<std::tuple_element_t<i, typename Function::Given>>(given[i])...));
  });
}

template <auto function>
PyObject* call(PyObject* self, PyObject* const* given, Py_ssize_t n_given) {
  constexpr std::size_t n = std::tuple_size_v<typename Signature<decltype(function)>::Given>;
  if (n_given != static_cast<Py_ssize_t>(n)) {
    return PyErr_Format(PyExc_TypeError, "%s: %zd arguments given to a method that has %zu",
                        Py_TYPE(self)->tp_name, n_given, n);
  }
  return call_with<function>(self, given, std::make_index_sequence<n>());
}

template <auto function>
PyObject* get(PyObject* self, void* /*closure*/) {
  return call_with<function>(self, nullptr, std::index_sequence<>());
}

// The function for a slot that takes only the object, such as tp_repr.
template <auto function>
PyObject* unary(PyObject* self) {
  return call_with<function>(self, nullptr, std::index_sequence<>());
}

// An entry of a type's table of methods. `doc` begins with "name($self, arguments, /)\n--\n\n".
template <auto function>
PyMethodDef method(const char* name, const char* doc) {
  // Cast via a function type without arguments: the compiler warns of any other cast.
  auto* const untyped = reinterpret_cast<void (*)()>(&call<function>);
  return {name, reinterpret_cast<PyCFunction>(untyped), METH_FASTCALL, doc};
}

// An entry of a type's table of properties: a read-only attribute.
template <auto function>
PyGetSetDef property(const char* name, const char* doc) {
  return {name, &get<function>, nullptr, doc, nullptr};
}

}  // namespace meshverse::bindings
