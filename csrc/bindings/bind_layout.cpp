#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings.h"
#include "fast_calls.h"
#include "layout.h"
#include "value_types.h"

namespace meshverse::bindings {
namespace {

Layout make_layout(PyObject* positional, PyObject* keywords) {
  PyObject* const axes = to_argument(positional, keywords, "O:Layout", "axes");
  std::vector<AxisLayout> list;
  for (const py::handle axis : py::iter(axes)) {
    if (!ValueType<AxisLayout>::is(axis.ptr())) {
      throw py::type_error("layout with axis " + std::string(py::repr(axis)) +
                           ": every axis must be an AxisLayout; Layout.from_shape takes sizes");
    }
    list.push_back(ValueType<AxisLayout>::of(axis.ptr()));
  }
  return Layout(std::move(list));
}

PyObject* make_layout_from_shape(PyObject* /*none*/, PyObject* positional, PyObject* keywords) {
  return or_error([&] {
    const auto [sizes, strides] = to_sizes_and_strides(positional, keywords, "O|O:from_shape");
    return to_python(strides ? Layout::from_shape(sizes, *strides) : Layout::row_major(sizes));
  });
}

py::tuple axes_of(const Layout& layout) {
  py::tuple axes(layout.axes().size());
  for (std::size_t i = 0; i < axes.size(); ++i) axes[i] = to_python(layout.axes()[i]);
  return axes;
}

py::tuple ascending_axes_of(const Layout& layout) {
  py::tuple axes(layout.axes().size());
  for (std::size_t i = 0; i < axes.size(); ++i) {
    const AxisLayout& axis = layout.axes()[i];
    axes[i] = to_python(axis.is_sorted() ? axis : axis.sorted());
  }
  return axes;
}

Layout unflatten(const Layout& layout, std::int64_t index, py::handle sizes) {
  return layout.unflatten(index, to_integers(sizes, "sizes"));
}

Layout select(const Layout& layout, py::handle indices) {
  return layout.select(to_integers(indices, "indices"));
}

std::optional<Layout> slice(const Layout& layout, py::handle indices) {
  return layout.slice(to_integers(indices, "indices"));
}

std::string repr_of(const Layout& layout) { return "Layout" + layout.to_string(); }

py::tuple reduced(const Layout& layout) {
  return py::make_tuple(ValueType<Layout>::type(), py::make_tuple(axes_of(layout)));
}

Py_ssize_t length(PyObject* self) {
  return static_cast<Py_ssize_t>(ValueType<Layout>::of(self).axes().size());
}

PyObject* axis_at(PyObject* self, PyObject* index) {
  return or_error(
      [&] { return to_python(ValueType<Layout>::of(self).axis(to_integer(index, "indices"))); });
}

// Of a sequence; Python has added the length to a negative index.
PyObject* item(PyObject* self, Py_ssize_t index) {
  if (index >= 0) return axis_at(self, py::int_(index).ptr());
  PyErr_SetString(PyExc_IndexError, "before the first axis of a layout");
  return nullptr;
}

PyObject* iterator(PyObject* self) {
  return or_error([&] { return py::iter(axes_of(ValueType<Layout>::of(self))); });
}

py::object create_layout() {
  static PyMethodDef methods[] = {
      {"from_shape",
       reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&make_layout_from_shape)),
       METH_VARARGS | METH_KEYWORDS | METH_STATIC, R"(from_shape(sizes, strides=None)
--

One axis for each size, row-major where no strides are given.

>>> Layout.from_shape((2, 4))
Layout(2:4, 4:1)
)"},
      method<&Layout::collapse>("collapse", R"(collapse($self, /)
--

All axes as one: from the row-major index over ``shape`` to the position.

>>> Layout.from_shape((2, 4)).collapse()
AxisLayout((8,):(1,))
)"),
      method<&unflatten>("unflatten", R"(unflatten($self, index, sizes, /)
--

This layout with the axis at ``index`` split into axes of these sizes, row-major.

Raises:
    IndexError: There is no such axis.
    ValueError: A size below 1, or sizes that do not multiply out to the axis.

>>> Layout.from_shape((2, 4)).unflatten(1, (2, 2))
Layout(2:4, 2:2, 2:1)
)"),
      method<&select>("select", R"(select($self, indices, /)
--

The axes at these indices, in this order; negative ones count from the end.

>>> Layout.from_shape((2, 3, 4)).select((2, 0))
Layout(4:1, 2:12)
)"),
      method<&slice>("slice", R"(slice($self, indices, /)
--

``select(indices)`` if a mesh can be sliced to it: it is sorted and orthogonal. Otherwise None.

>>> whole = Layout.from_shape((2, 3, 4))
>>> whole.slice((0, 2)), whole.slice((2, 0))
(Layout(2:12, 4:1), None)
)"),
      method<&Layout::concatenate>("concatenate", R"(concatenate($self, other, /)
--

These axes, then those of ``other``.)"),
      method<&Layout::is_orthogonal>("is_orthogonal", R"(is_orthogonal($self, /)
--

Whether the collapsed layout is orthogonal.)"),
      method<&Layout::is_sorted>("is_sorted", R"(is_sorted($self, /)
--

Whether the collapsed layout is sorted.)"),
      method<&Layout::coordinate>("coordinate", R"(coordinate($self, position, /)
--

Index on every axis of ``position``, in the copy of this layout that holds it.

Raises:
    ValueError: The layout is not orthogonal.
    IndexError: ``position`` is negative.

>>> Layout.from_shape((2, 4)).coordinate(6)
(1, 2)
)"),
      method<&Layout::base>("base", R"(base($self, position, /)
--

Position of coordinate ``(0, ..., 0)`` in the copy of this layout that holds ``position``.

Raises:
    ValueError: The layout is not orthogonal.
    IndexError: ``position`` is negative.

>>> Layout.from_shape((2, 4)).base(13)
8
)"),
      method<&reduced>("__reduce__", "__reduce__($self, /)\n--\n\nFor pickle."),
      {}};
  static PyGetSetDef properties[] = {
      property<&axes_of>("axes", "The axis layouts, in order."),
      property<&ascending_axes_of>("ascending", "Each axis with its positions in ascending order."),
      property<&Layout::shape>("shape", "Size of every axis."),
      property<&Layout::size>("size", "Number of positions, the product of the shape."),
      property<&Layout::cosize>("cosize", "The largest position + 1."),
      {}};
  const std::vector<PyType_Slot> slots = {{Py_mp_length, untyped(&length)},
                                          {Py_mp_subscript, untyped(&axis_at)},
                                          {Py_sq_length, untyped(&length)},
                                          {Py_sq_item, untyped(&item)},
                                          {Py_tp_iter, untyped(&iterator)},
                                          {Py_tp_repr, untyped(&unary<&repr_of>)},
                                          {Py_tp_str, untyped(&unary<&Layout::to_string>)}};
  return ValueType<Layout>::create<&make_layout>("meshverse._core.Layout", R"(Layout(axes)
--

The ordered axis layouts of a mesh. Immutable.

Args:
    axes: The layout of every axis.

>>> Layout([AxisLayout(2, 4), AxisLayout((2, 2), (8, 1))])
Layout(2:4, (2,2):(8,1))
)",
                                                 methods, properties, slots);
}

}  // namespace

void bind_layout(py::module_& module) { module.attr("Layout") = create_layout(); }

}  // namespace meshverse::bindings
