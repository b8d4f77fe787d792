// A c10d backend for tests: ranks talk through the store, a key for each rank and collective.
// It overrides what a backend must, and no more: above all, it has no `getBackendOptions`.
#pragma once

#include <ATen/ATen.h>
#include <cstdint>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>
#include <utility>
#include <vector>

namespace store_backend {

using Bytes = std::vector<std::uint8_t>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Every collective has ended when it returns.
class Done : public c10d::Work {
 public:
  explicit Done(std::vector<at::Tensor> outputs)
      : outputs_(std::move(outputs)),
        future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()))) {
    future_->markCompleted(at::IValue(outputs_));
  }

  bool isCompleted() override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  std::vector<at::Tensor> outputs_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

inline WorkPtr done(std::vector<at::Tensor> outputs) {
  return c10::make_intrusive<Done>(std::move(outputs));
}

inline Bytes to_bytes(const at::Tensor& tensor) {
  const at::Tensor dense = tensor.contiguous();
  const auto* data = static_cast<const std::uint8_t*>(dense.data_ptr());
  return Bytes(data, data + dense.nbytes());
}

// A tensor like `like`, of these bytes.
inline at::Tensor to_tensor(Bytes bytes, const at::Tensor& like) {
  return at::from_blob(bytes.data(), like.sizes(), like.options()).clone();
}

class StoreBackend : public c10d::Backend {
 public:
  StoreBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size)
      : Backend(rank, size), store_(std::move(store)) {}

  const std::string getBackendName() const override { return "via_store"; }

  // c10d's debug wrapper asks for these two.
  void setSequenceNumberForGroup() override {}
  std::uint64_t getSequenceNumberForGroup() override { return static_cast<std::uint64_t>(rounds_); }

  WorkPtr broadcast(std::vector<at::Tensor>& tensors,
                    const c10d::BroadcastOptions& options) override {
    at::Tensor& tensor = tensors.at(0);
    tensor.copy_(gather_all(tensor).at(static_cast<std::size_t>(options.rootRank)));
    return done(tensors);
  }

  WorkPtr allreduce(std::vector<at::Tensor>& tensors,
                    const c10d::AllreduceOptions& options) override {
    at::Tensor& tensor = tensors.at(0);
    tensor.copy_(reduce(gather_all(tensor), options.reduceOp));
    return done(tensors);
  }

  WorkPtr allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                    const c10d::AllgatherOptions&) override {
    const std::vector<at::Tensor> parts = gather_all(inputs.at(0));
    for (std::size_t i = 0; i < parts.size(); ++i) outputs.at(0).at(i).copy_(parts[i]);
    return done(outputs.at(0));
  }

  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions&) override {
    output.copy_(at::stack(gather_all(input)).view(output.sizes()));
    return done({output});
  }

  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions& options) override {
    const at::Tensor sum = reduce(gather_all(input), options.reduceOp);
    output.copy_(sum.view({getSize(), -1})[getRank()].view(output.sizes()));
    return done({output});
  }

  WorkPtr allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                          std::vector<at::Tensor>& inputs,
                                          const c10d::AllgatherOptions& options) override {
    for (std::size_t i = 0; i < inputs.size(); ++i) _allgather_base(outputs[i], inputs[i], options);
    return done(outputs);
  }

  WorkPtr reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                          std::vector<at::Tensor>& inputs,
                                          const c10d::ReduceScatterOptions& options) override {
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      _reduce_scatter_base(outputs[i], inputs[i], options);
    }
    return done(outputs);
  }

  WorkPtr scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                  const c10d::ScatterOptions& options) override {
    const bool sends = getRank() == options.rootRank;
    const at::Tensor mine = sends ? at::stack(inputs.at(0)) : at::Tensor();
    std::vector<std::int64_t> shape = outputs.at(0).sizes().vec();
    shape.insert(shape.begin(), getSize());
    const Bytes sent =
        exchange(sends ? to_bytes(mine) : Bytes()).at(static_cast<std::size_t>(options.rootRank));
    outputs.at(0).copy_(to_tensor(sent, at::empty(shape, outputs.at(0).options()))[getRank()]);
    return done(outputs);
  }

  WorkPtr barrier(const c10d::BarrierOptions&) override {
    exchange({});
    return done({});
  }

 protected:
  c10::intrusive_ptr<c10d::Store> store_;

  // Returns the bytes of every rank, by rank. All collectives use it; ranks call it in one order.
  virtual std::vector<Bytes> exchange(const Bytes& mine) {
    const std::string round = std::to_string(rounds_++) + "/";
    store_->set(round + std::to_string(getRank()), mine);
    std::vector<Bytes> all;
    for (int rank = 0; rank < getSize(); ++rank) {
      all.push_back(store_->get(round + std::to_string(rank)));
    }
    return all;
  }

 private:
  std::vector<at::Tensor> gather_all(const at::Tensor& mine) {
    std::vector<at::Tensor> tensors;
    for (Bytes& bytes : exchange(to_bytes(mine))) {
      tensors.push_back(to_tensor(std::move(bytes), mine));
    }
    return tensors;
  }

  static at::Tensor reduce(const std::vector<at::Tensor>& parts, const c10d::ReduceOp& op) {
    const at::Tensor stacked = at::stack(parts);
    if (op == c10d::ReduceOp::AVG) return stacked.mean(0);
    TORCH_CHECK(op == c10d::ReduceOp::SUM, "the backend \"via_store\" knows SUM and AVG only");
    return stacked.sum(0, false, stacked.scalar_type());
  }

  std::int64_t rounds_ = 0;
};

}  // namespace store_backend
