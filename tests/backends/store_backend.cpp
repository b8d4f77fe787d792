// The backends for tests, and what Python sees of them: "via_store" and "splitting".
#include "store_backend.hpp"

#include <pybind11/stl.h>

#include "splitting_backend.hpp"
#include "tester_device.hpp"

namespace {

namespace py = pybind11;

// A device of the ranks' machines that options refer to: an object without fields.
struct Device {};

struct Wiring {
  std::int64_t chunk_bytes = 1 << 20;
  std::string network;
};

// Options as an out-of-tree backend may have them: data, a struct of data, handles, and whatever
// Python's side of it wants to know.
struct Options : c10d::Backend::Options {
  Options() : c10d::Backend::Options("via_store") {}

  Wiring wiring;
  std::vector<std::shared_ptr<Device>> devices;
  py::object hints = py::none();
};

}  // namespace

PYBIND11_MODULE(store_backend, module) {
  py::class_<Device, std::shared_ptr<Device>>(module, "Device").def(py::init<>());
  py::class_<Wiring>(module, "Wiring")
      .def(py::init<>())
      .def_readwrite("chunk_bytes", &Wiring::chunk_bytes)
      .def_readwrite("network", &Wiring::network);
  py::class_<Options, c10d::Backend::Options, c10::intrusive_ptr<Options>>(module, "Options")
      .def(py::init<>())
      .def_readwrite("wiring", &Options::wiring)
      .def_readwrite("devices", &Options::devices)
      .def_readwrite("hints", &Options::hints);

  // c10d's own face of a backend, as for any that binds no class of its own.
  module.def(
      "create",
      [](const c10::intrusive_ptr<c10d::Store>& store, int rank,
         int size) -> c10::intrusive_ptr<c10d::Backend> {
        return c10::make_intrusive<store_backend::StoreBackend>(store, rank, size);
      },
      py::arg("store"), py::arg("rank"), py::arg("size"));

  splitting_backend::bind(module);
  module.def("register_device", &tester_device::register_hooks);
}
