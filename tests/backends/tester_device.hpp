// The hooks of an accelerator that default groups can be bound to, and nothing else: no tensor is
// ever on it. So in C++ it is not available, whatever its Python module says.
#pragma once

#include <ATen/detail/PrivateUse1HooksInterface.h>

namespace tester_device {

struct Hooks : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return false; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
};

inline void register_hooks() {
  static Hooks hooks;
  if (!at::isPrivateUse1HooksRegistered()) at::RegisterPrivateUse1HooksInterface(&hooks);
}

}  // namespace tester_device
