// Shared declarations of the simulated accelerator, see device.cpp.
#pragma once

#include <torch/extension.h>

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace simulated {

constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kType, 0);
const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

struct Counters {
  std::atomic<int64_t> launches{0}, waits{0}, allocated{0}, peak{0};
  std::map<std::string, int64_t> operators;
  std::mutex mutex;
  PyObject* callback = nullptr;
};
Counters& counters();
void wait(const char* kind, const std::string& op, int64_t bytes);
void launch(const std::string& op);

struct Generator final : c10::GeneratorImpl {
  at::Generator host;
  explicit Generator(uint64_t seed = c10::default_rng_seed_val);
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  static c10::DeviceType device_type() { return kType; }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator();
    copy->host = host.clone();
    return copy;
  }
};
const at::Generator& default_generator();
c10::Allocator* allocator();
at::Tensor to_device(const at::Tensor& tensor);

// Names of operators that accept CPU scalars among tensors of the device, and of composites that are one launch.
void configure(const std::vector<std::string>& scalars, const std::vector<std::string>& single_launch);

}  // namespace simulated
