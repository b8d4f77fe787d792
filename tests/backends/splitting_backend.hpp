// A c10d backend for tests that splits, shrinks and can be suspended, as strictly as NCCL: all ranks
// of the parent take part in a split, in one order; members agree on the new group's name; options
// are of its own type; nothing can be done with it while it is suspended, or after an abort, which
// leaves alone what was split off it.
#pragma once

#include <algorithm>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <unordered_map>

#include "store_backend.hpp"

namespace splitting_backend {

namespace py = pybind11;

using store_backend::Bytes;

// Options with data of their own. As NCCL, a split writes what it was split from.
struct SplittingOptions : c10d::Backend::Options {
  SplittingOptions() : c10d::Backend::Options("splitting") {}

  std::int64_t channels = 16;
  std::string split_from;
};

class SplittingBackend : public store_backend::StoreBackend {
 public:
  SplittingBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                   c10::intrusive_ptr<SplittingOptions> options)
      : StoreBackend(std::move(store), rank, size), options_(std::move(options)) {}

  const std::string getBackendName() const override { return "splitting"; }
  bool supportsSplitting() const override { return true; }
  bool supportsShrinking() const override { return true; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override { return options_; }
  c10::intrusive_ptr<SplittingOptions> options() { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  void eagerConnectSingleDevice(at::Device) override { is_connected_ = true; }

  bool is_connected() const { return is_connected_; }
  std::int64_t splits() const { return splits_; }
  std::int64_t memberless_splits() const { return memberless_splits_; }

  c10::intrusive_ptr<c10d::Backend> split(
      const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
      const c10::intrusive_ptr<c10d::Backend::Options>& given) override {
    auto options = c10::dynamic_intrusive_pointer_cast<SplittingOptions>(given);
    TORCH_CHECK(options != nullptr, "the backend \"splitting\" was given options of another one");
    TORCH_CHECK(options != options_, "a split was given its parent's own options");
    const auto place = std::find(ranks.begin(), ranks.end(), getRank());
    const bool is_member = place != ranks.end();
    agree("split", is_member ? options->group_name : "", ranks);
    ++(is_member ? splits_ : memberless_splits_);
    if (!is_member) return nullptr;
    options->split_from = getGroupUid();
    return make(store, static_cast<int>(place - ranks.begin()), ranks.size(), options);
  }

  // c10d calls this on ranks that are in none of the new groups, where it splits by itself.
  void perform_nocolor_split(const at::Device&) {
    agree("split", "", {});
    ++memberless_splits_;
  }

  c10::intrusive_ptr<c10d::Backend> shrink(
      const std::vector<std::int64_t>& without, int,
      const c10::intrusive_ptr<c10d::Backend::Options>& given) override {
    std::vector<int> left;
    for (int rank = 0; rank < getSize(); ++rank) {
      if (std::find(without.begin(), without.end(), rank) == without.end()) left.push_back(rank);
    }
    const auto place = std::find(left.begin(), left.end(), getRank());
    auto options = c10::dynamic_intrusive_pointer_cast<SplittingOptions>(given);
    if (options == nullptr) options = c10::make_intrusive<SplittingOptions>(*options_);
    auto store = c10::make_intrusive<c10d::PrefixStore>("shrunk/", store_);
    return make(store, static_cast<int>(place - left.begin()), left.size(), options);
  }

  // Not `override`: torch has these three since 2.12. All ranks do them together.
  void suspend() {
    TORCH_CHECK(!suspended_, "the backend \"splitting\" is suspended already");
    agree("suspend", "", {});
    suspended_ = true;
  }

  void resume() {
    TORCH_CHECK(suspended_, "the backend \"splitting\" is not suspended");
    suspended_ = false;
    agree("resume", "", {});
  }

  void abort() override { is_aborted_ = true; }

  std::unordered_map<std::string, std::uint64_t> getMemoryStats() {
    return {{"suspended", suspended_ ? 1024 : 0}, {"total", suspended_ ? 64 : 1088}};
  }

 protected:
  std::vector<Bytes> exchange(const Bytes& mine) override {
    TORCH_CHECK(!suspended_, "the backend \"splitting\" was used while it is suspended");
    TORCH_CHECK(!is_aborted_, "the backend \"splitting\" was used after it was aborted");
    return StoreBackend::exchange(mine);
  }

 private:
  static c10::intrusive_ptr<c10d::Backend> make(
      const c10::intrusive_ptr<c10d::Store>& store, int rank, std::size_t size,
      const c10::intrusive_ptr<SplittingOptions>& options) {
    auto made = c10::make_intrusive<SplittingBackend>(store, rank, static_cast<int>(size), options);
    made->is_connected_ = true;
    return made;
  }

  // Wait until all ranks do the same; those with the same members call it by the same name.
  void agree(const std::string& what, const std::string& name, const std::vector<int>& ranks) {
    std::string members = what + ":";
    for (const int rank : ranks) members += " " + std::to_string(rank);
    const std::string mine = members + "/" + name;
    int rank = 0;
    for (const Bytes& bytes : exchange(Bytes(mine.begin(), mine.end()))) {
      const std::string theirs(bytes.begin(), bytes.end());
      const bool is_member = std::find(ranks.begin(), ranks.end(), rank++) != ranks.end();
      TORCH_CHECK(theirs.rfind(what, 0) == 0, "one rank does '", mine, "', another '", theirs, "'");
      TORCH_CHECK(!is_member || name.empty() || theirs == mine, "the members of a group do '", mine,
                  "' and '", theirs, "'");
    }
  }

  c10::intrusive_ptr<SplittingOptions> options_;
  std::int64_t splits_ = 0;
  std::int64_t memberless_splits_ = 0;
  bool is_connected_ = false;
  bool suspended_ = false;
  bool is_aborted_ = false;
};

inline void bind(py::module_& module) {
  py::class_<SplittingOptions, c10d::Backend::Options, c10::intrusive_ptr<SplittingOptions>>(
      module, "SplittingOptions")
      .def(py::init<>())
      .def("__copy__",
           [](const SplittingOptions& from) { return c10::make_intrusive<SplittingOptions>(from); })
      .def("__deepcopy__",
           [](const SplittingOptions& from, const py::dict&) {
             return c10::make_intrusive<SplittingOptions>(from);
           })
      .def_readwrite("channels", &SplittingOptions::channels)
      .def_readwrite("split_from", &SplittingOptions::split_from);

  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  using Holder = c10::intrusive_ptr<SplittingBackend>;
  py::class_<SplittingBackend, Holder, c10d::Backend>(module, "SplittingBackend")
      .def(py::init([](const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                       c10::intrusive_ptr<SplittingOptions> options) {
        return c10::make_intrusive<SplittingBackend>(store, rank, size, std::move(options));
      }))
      .def_property_readonly("options", &SplittingBackend::options)
      .def_property_readonly("is_connected", &SplittingBackend::is_connected)
      .def_property_readonly("splits", &SplittingBackend::splits)
      .def_property_readonly("memberless_splits", &SplittingBackend::memberless_splits)
      .def("perform_nocolor_split", &SplittingBackend::perform_nocolor_split, unlocked)
      .def("suspend", &SplittingBackend::suspend, unlocked)
      .def("resume", &SplittingBackend::resume, unlocked)
      .def("memory_stats", &SplittingBackend::getMemoryStats, unlocked);
}

}  // namespace splitting_backend
