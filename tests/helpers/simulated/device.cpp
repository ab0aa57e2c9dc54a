// A simulated accelerator as torch's PrivateUse1 device: memory of the host, arithmetic of the CPU, rules of CUDA.
//
// This file has the device itself: memory, streams, generators, and the module. `kernels.cpp` has its operators.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstdlib>
#include <cstring>

namespace simulated {

Counters& counters() {
  static Counters found;
  return found;
}

// Calls Python for a wait, with its kind, operator and bytes; launches are only counted.
void wait(const char* kind, const std::string& op, int64_t bytes) {
  ++counters().waits;
  PyObject* callback = counters().callback;
  if (callback == nullptr) return;
  pybind11::gil_scoped_acquire gil;
  PyObject* result = PyObject_CallFunction(callback, "ssL", kind, op.c_str(), static_cast<long long>(bytes));
  if (result == nullptr) PyErr_WriteUnraisable(callback);
  Py_XDECREF(result);
}

void launch(const std::string& op) {
  ++counters().launches;
  std::lock_guard<std::mutex> guard(counters().mutex);
  ++counters().operators[op];
}

namespace {

// Fresh memory is full of NaN and -1, so that reading before writing shows. It counts what is allocated.
struct HostMemory final : c10::Allocator {
  struct Block {
    void* data;
    int64_t size;
  };
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    counters().allocated -= block->size;
    std::free(block->data);
    delete block;
  }
  c10::DataPtr allocate(size_t size) override {
    auto* block = new Block{nullptr, static_cast<int64_t>(size)};
    if (size > 0) {
      TORCH_CHECK(posix_memalign(&block->data, 64, size) == 0, "The simulated device is out of memory.");
      if (size <= kPoisoned) std::memset(block->data, 0xFF, size);
    }
    auto now = counters().allocated += block->size;
    auto peak = counters().peak.load();
    while (now > peak && !counters().peak.compare_exchange_weak(peak, now)) {
    }
    return {block->data, block, &release, kDevice};
  }
  void copy_data(void* target, const void* source, std::size_t size) const override { std::memcpy(target, source, size); }
  static constexpr size_t kPoisoned = 1 << 20;
};
HostMemory memory_of_device;
REGISTER_ALLOCATOR(kType, &memory_of_device);

// One device with one stream: the work of a launch is done when it returns.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kType;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device device) const override { TORCH_CHECK(device.index() <= 0, "invalid device ordinal"); }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream(); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream given) const noexcept override { return given; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { wait("sync", "stream", 0); }
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override { wait("sync", "device", 0); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return default_generator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::make_generator<Generator>(); }
  at::Device getDeviceFromPtr(void*) const override { return kDevice; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::DeviceType::CPU); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* held = storage.unsafeGetStorageImpl();
    auto fresh = memory_of_device.allocate(size);
    if (held->nbytes() > 0 && size > 0) std::memcpy(fresh.mutable_get(), held->data(), std::min(size, held->nbytes()));
    held->set_data_ptr_noswap(std::move(fresh));
    held->set_nbytes(size);
  }
};

}  // namespace

c10::Allocator* allocator() { return &memory_of_device; }

// The numbers of a generator of the device are those of a CPU generator with the same seed.
Generator::Generator(uint64_t seed)
    : c10::GeneratorImpl(kDevice, kKeys), host(at::detail::createCPUGenerator(seed)) {}

const at::Generator& default_generator() {
  static at::Generator made = at::make_generator<Generator>();
  return made;
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  module.def("configure", &configure);
  module.def("set_callback", [](pybind11::object callback) {
    Py_XDECREF(counters().callback);
    counters().callback = callback.is_none() ? nullptr : callback.release().ptr();
  });
  module.def("launches", [] { return counters().launches.load(); });
  module.def("waits", [] { return counters().waits.load(); });
  module.def("operators", [] {
    std::lock_guard<std::mutex> guard(counters().mutex);
    return counters().operators;
  });
  module.def("memory", [] { return std::make_pair(counters().allocated.load(), counters().peak.load()); });
  module.def("reset_peak", [] { counters().peak = counters().allocated.load(); });
  module.def("share", &to_device);
  module.def("default_generator", [] { return default_generator(); });
}

}  // namespace simulated
