#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "bindings.h"
#include "fast_calls.h"
#include "group_cache.h"
#include "handles.h"
#include "layout.h"
#include "value_types.h"

namespace meshverse::bindings {
namespace {

using namespace py::literals;

// Releases the GIL during a wait, so that another thread can finish the entry. Python runs signal
// handlers, such as that of Ctrl-C, in the main thread: if one raises, the wait ends.
class InterpreterReleased {
 public:
  bool may_give_up() const { return is_main_thread_; }

  void give_up_if_asked() const {
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
  }

 private:
  static bool is_main_thread() {
    const py::module_ threading = py::module_::import("threading");
    const py::object main_thread = threading.attr("main_thread")().attr("ident");
    return main_thread.equal(threading.attr("get_ident")());
  }

  const bool is_main_thread_ = is_main_thread();  // before the GIL is released
  const Unlocked released_;
};

using PyGroupCache = GroupCache<py::object, InterpreterReleased>;

py::object none_if_absent(py::object entry) { return entry ? std::move(entry) : py::none(); }

// The entries of `n` axes from `first` on, sorted to ascend; None unless all exist.
py::object find(const PyGroupCache& cache, const Layout& layout, std::int64_t first, std::int64_t n,
                const OptionsKey& options) {
  const auto n_axes = static_cast<std::int64_t>(layout.axes().size());
  if (first < 0 || n < 0 || first > n_axes || n > n_axes - first) {
    throw std::out_of_range(std::to_string(n) + " axes from axis " + std::to_string(first) +
                            " on of layout " + layout.to_string() + ": it has " +
                            std::to_string(n_axes) + " axes");
  }
  py::list entries;
  GroupKey key{AxisLayout(), options};
  for (std::int64_t i = first; i < first + n; ++i) {
    const AxisLayout& axis = layout.axis(i);
    key.axis = axis.is_sorted() ? axis : axis.sorted();
    py::object entry = cache.get(key);
    if (!entry) return py::none();
    entries.append(std::move(entry));
  }
  return entries;
}

py::list entries_of(const PyGroupCache& cache) {
  py::list entries;
  for (const auto& [key, entry] : cache.items()) {
    entries.append(py::make_tuple(key.axis, key.options, entry));
  }
  return entries;
}

PyGroupCache* cache_if_constructed(PyObject* self) {
  return py::detail::is_holder_constructed(self) ? py::handle(self).cast<PyGroupCache*>() : nullptr;
}

// Entries, and the handles of keys, may refer back to the owner of the cache: Python's garbage
// collector must see them.
int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  int result = 0;
  if (PyGroupCache* cache = cache_if_constructed(self)) {
    cache->visit_items([&](const GroupKey& key, const py::object& entry) {
      if (result == 0) result = visit(entry.ptr(), arg);
      if (result == 0) {
        result = traverse_handles(key.options, PyGroupCache::kCopiesOfKey, visit, arg);
      }
    });
  }
  return result;
}

int clear(PyObject* self) {
  if (PyGroupCache* cache = cache_if_constructed(self)) cache->clear();
  return 0;
}

py::object get_or_create(PyGroupCache& cache, const AxisLayout& axis, const OptionsKey& key,
                         py::handle make) {
  if (PyCallable_Check(make.ptr()) == 0) throw py::type_error("make must be callable");
  GroupKey group{axis, key};
  own_references(group.options);
  return cache.get_or_create(group, [&] {
    // Not make(): it would drop references without the lock as Python ends a daemon thread.
    auto made = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(make.ptr()));
    if (!made) throw py::error_already_set();
    return made;
  });
}

py::object get(const PyGroupCache& cache, const AxisLayout& axis, const OptionsKey& key) {
  return none_if_absent(cache.get({axis, key}));
}

PyMethodDef methods[] = {
    method<&get_or_create>("get_or_create", R"(get_or_create($self, axis, key, make, /)
--

Return the entry of ``(axis, key)``: the existing one, or the result of ``make()``.

If another thread is creating the entry, this one waits for it; in the main thread, an exception of a
signal handler, such as KeyboardInterrupt, ends the wait. If ``make`` raises, nothing is kept: the
exception passes through, and the next caller creates the entry.

Raises:
    RuntimeError: Waiting would be a deadlock, as when ``make`` requests the entry that it creates.
)"),
    method<&get>("get", R"(get($self, axis, key, /)
--

Return the entry of ``(axis, key)``, or None if there is none yet.)"),
    method<&find>("find", R"(find($self, layout, first, n, key, /)
--

Return the entries of ``n`` axes of a layout under one key, or None unless all exist.

An axis that does not ascend is sorted first.

Raises:
    IndexError: The layout has fewer than ``first + n`` axes.
)"),
    {}};

void set_up(PyHeapTypeObject* heap_type) {
  heap_type->ht_type.tp_flags |= Py_TPFLAGS_HAVE_GC;
  heap_type->ht_type.tp_traverse = &traverse;
  heap_type->ht_type.tp_clear = &clear;
  heap_type->ht_type.tp_methods = methods;
}

}  // namespace

void bind_group_cache(py::module_& module) {
  py::class_<PyGroupCache> cache(module, "GroupCache", py::is_final(), plain_class(),
                                 py::custom_type_setup(&set_up),
                                 R"(A cache with one entry for each axis layout and options key.

>>> cache = GroupCache()
>>> key = OptionsKey.of("gloo")
>>> cache.get_or_create(AxisLayout(4), key, lambda: "made"), cache.get(AxisLayout(4), key)
('made', 'made')
)");
  cache.def(py::init<>())
      .def("entries", &entries_of, "Every ``(axis, key, entry)``, in order of creation.")
      .def(
          "remove",
          [](PyGroupCache& self, const AxisLayout& axis, const OptionsKey& key,
             const py::object& entry) {
            return self.remove({axis, key},
                               [&](const py::object& known) { return known.is(entry); });
          },
          "axis"_a, "key"_a, "entry"_a,
          "Remove an entry; False if ``(axis, key)`` has another one or none, or it is being "
          "created.\n\nOf several threads that remove the same entry, one gets True.")
      .def("clear", &PyGroupCache::clear, "Remove every entry.")
      .def("reset_after_fork", &PyGroupCache::reset_after_fork,
           "In a forked process, drop the entries that other threads were creating.\n\nUntil this "
           "is "
           "called there, other calls can wait for ever.")
      .def("__len__", &PyGroupCache::size);
  set_new(cache, [](const py::object&) { return std::make_unique<PyGroupCache>(); });
}

}  // namespace meshverse::bindings
