#include <string>

#include "bindings.h"

namespace meshverse::bindings {
namespace {

std::string shown(py::handle value) {
  return std::string(py::repr(value)) + " of type " + Py_TYPE(value.ptr())->tp_name;
}

// Replaces a TypeError of the interpreter by one that names the argument; rethrows other errors.
[[noreturn]] void throw_type_error(const char* name, const char* rule, py::handle value) {
  if (!PyErr_ExceptionMatches(PyExc_TypeError)) throw py::error_already_set();
  PyErr_Clear();  // before repr() runs
  throw py::type_error(std::string(name) + rule + ", got " + shown(value));
}

}  // namespace

std::string to_text(py::handle value) {
  if (PyUnicode_Check(value.ptr()) == 0) throw py::type_error("not a string: " + shown(value));
  Py_ssize_t size = 0;
  const char* const text = PyUnicode_AsUTF8AndSize(value.ptr(), &size);
  if (text == nullptr) throw py::error_already_set();
  return {text, static_cast<std::size_t>(size)};
}

std::int64_t to_integer(py::handle value, const char* name) {
  const auto index = py::reinterpret_steal<py::object>(PyNumber_Index(value.ptr()));
  if (!index) throw_type_error(name, " must be integers", value);
  int overflow = 0;
  const long long integer = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
  if (overflow != 0) {
    throw std::overflow_error(std::string(name) + " with " + std::string(py::repr(value)) +
                              ": integers must fit 64 bits with a sign");
  }
  return integer;
}

std::vector<std::int64_t> to_integers(py::handle values, const char* name) {
  // A copy as a tuple: an item's __index__ is foreign code, which may change a list.
  const auto items = py::reinterpret_steal<py::object>(PySequence_Tuple(values.ptr()));
  if (!items) throw_type_error(name, " must be a sequence of integers", values);
  std::vector<std::int64_t> integers;
  const Py_ssize_t length = PyTuple_GET_SIZE(items.ptr());
  integers.reserve(static_cast<std::size_t>(length));
  for (Py_ssize_t i = 0; i < length; ++i) {
    integers.push_back(to_integer(PyTuple_GET_ITEM(items.ptr(), i), name));
  }
  return integers;
}

std::vector<std::int64_t> to_one_or_more_integers(py::handle values, const char* name) {
  if (PyLong_Check(values.ptr())) return {to_integer(values, name)};
  return to_integers(values, name);
}

SizesAndStrides to_sizes_and_strides(PyObject* positional, PyObject* keywords, const char* format) {
  static const char* names[] = {"sizes", "strides", nullptr};
  PyObject *sizes = nullptr, *strides = Py_None;
  if (PyArg_ParseTupleAndKeywords(positional, keywords, format, const_cast<char**>(names), &sizes,
                                  &strides) == 0) {
    throw py::error_already_set();
  }
  SizesAndStrides given{to_one_or_more_integers(sizes, "sizes"), std::nullopt};
  if (strides != Py_None) given.strides = to_one_or_more_integers(strides, "strides");
  return given;
}

PyObject* to_argument(PyObject* positional, PyObject* keywords, const char* format,
                      const char* name, PyObject* otherwise) {
  const char* names[] = {name, nullptr};
  PyObject* given = otherwise;
  if (PyArg_ParseTupleAndKeywords(positional, keywords, format, const_cast<char**>(names),
                                  &given) == 0) {
    throw py::error_already_set();
  }
  return given;
}

py::tuple to_tuple(const std::vector<std::int64_t>& values) {
  py::tuple tuple(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) tuple[i] = py::int_(values[i]);
  return tuple;
}

}  // namespace meshverse::bindings
