// Operators of the simulated accelerator: every one runs the CPU kernel on the same memory, after the checks of CUDA.
#include "device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <unordered_set>

namespace simulated {

// The same memory as a tensor of the device.
at::Tensor to_device(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() == kType) return tensor;
  TORCH_CHECK(tensor.layout() == at::kStrided, "The simulated device has strided tensors only, got ", tensor.layout());
  auto* owner = new at::Tensor(tensor);
  c10::DataPtr data(
      tensor.storage().mutable_data(), owner, [](void* held) { delete static_cast<at::Tensor*>(held); }, kDevice);
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(data), allocator(), /*resizable=*/true);
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), kKeys, tensor.dtype());
  auto* found = made.unsafeGetTensorImpl();
  found->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) found->set_wrapped_number(true);
  return made;
}

namespace {

using c10::IValue;
using Sizes = c10::SymIntArrayRef;
using Dtype = std::optional<c10::ScalarType>;
using Layout = std::optional<c10::Layout>;
using Where = std::optional<c10::Device>;
using Flag = std::optional<bool>;
using Maybe = std::optional<at::Tensor>;

std::unordered_set<std::string> accept_scalars;
// Operators whose result has a size that the host must read.
const std::unordered_set<std::string> kReadSizes{
    "aten::nonzero",          "aten::masked_select",      "aten::equal",       "aten::_unique2",
    "aten::_unique",          "aten::unique_dim",         "aten::bincount",    "aten::unique_consecutive",
    "aten::multinomial",      "aten::repeat_interleave",  "aten::histc",       "aten::unique_dim_consecutive",
    "aten::_linalg_eigh",     "aten::linalg_eig",         "aten::_linalg_svd",
};
const std::unordered_set<std::string> kIndexing{
    "aten::index", "aten::_unsafe_index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"};

bool ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }
bool is_mask(const at::Tensor& t) { return t.scalar_type() == at::kBool || t.scalar_type() == at::kByte; }

// The same memory as a CPU tensor.
at::Tensor to_host(const at::Tensor& tensor) {
  if (!ours(tensor)) return tensor;
  auto options = tensor.options().device(at::kCPU).requires_grad(false);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {}, options);
}

at::Tensor to_host(const Maybe& tensor) {
  return tensor.has_value() && tensor->defined() ? to_host(*tensor) : at::Tensor();
}

// One call of an operator: its arguments as the caller gave them, and as the CPU kernel gets them.
struct Call {
  const c10::FunctionSchema& schema;
  std::string name, full;
  torch::jit::Stack* stack;
  size_t first;
  std::vector<IValue> given;
  std::vector<at::Tensor> hosts;
  bool mask = false;

  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : schema(op.schema()), name(schema.name()), stack(stack), first(stack->size() - schema.arguments().size()) {
    full = schema.overload_name().empty() ? name : name + "." + schema.overload_name();
    given.assign(stack->begin() + static_cast<int64_t>(first), stack->end());
    hosts.resize(given.size());
  }

  void check(const at::Tensor& tensor, const std::string& argument, bool index) const {
    if (!tensor.defined() || ours(tensor) || name == "aten::_pack_padded_sequence") return;
    if (index) return wait("h2d", full + " (index)", static_cast<int64_t>(tensor.nbytes()));
    if (tensor.dim() == 0 && tensor.device().is_cpu() && (accept_scalars.count(full) > 0 || kIndexing.count(name) > 0))
      return;
    TORCH_CHECK(
        false, "Expected all tensors to be on the same device, but found at least two devices, ", kDevice, " and ",
        tensor.device(), "! (argument ", argument, " of ", full, ", sizes ", tensor.sizes(), ")");
  }

  void to_hosts() {
    for (size_t i = 0; i < given.size(); ++i) {
      const IValue& value = given[i];
      const std::string& argument = schema.arguments()[i].name();
      IValue& slot = (*stack)[first + i];
      if (value.isTensor()) {
        check(value.toTensor(), argument, false);
        slot = hosts[i] = to_host(value.toTensor());
      } else if (value.isTensorList()) {
        auto list = value.toTensorVector();
        for (auto& tensor : list) {
          if (argument != "state_steps" && argument != "scalars") check(tensor, argument, false);
          tensor = to_host(tensor);
        }
        slot = IValue(c10::List<at::Tensor>(list));
      } else if (value.isOptionalTensorList()) {
        c10::List<Maybe> list;
        for (const auto& entry : value.toOptionalTensorVector()) {
          if (entry.has_value() && entry->defined()) {
            check(*entry, argument, kIndexing.count(name) > 0);
            mask = mask || (kIndexing.count(name) > 0 && ours(*entry) && is_mask(*entry));
            list.push_back(to_host(*entry));
          } else {
            list.push_back(entry);
          }
        }
        slot = IValue(list);
      } else if (value.isDevice() && value.toDevice().type() == kType) {
        slot = c10::Device(at::kCPU);
      } else if (value.isGenerator() || (value.isNone() && argument == "generator")) {
        auto generator = value.isGenerator() ? value.toGenerator() : default_generator();
        TORCH_CHECK(
            generator.device().type() == kType, "Expected a '", kType, "' device type for generator but found '",
            generator.device().type(), "' (", full, ")");
        slot = static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->host;
      }
    }
  }

  void count() const {
    launch(full);
    const bool puts = name == "aten::_index_put_impl_";
    const bool fills = puts && given[2].toTensor().numel() == 1;  // a mask and one value: masked_fill, no wait
    if (mask && !fills) wait("size", name.substr(6) + " (mask)", 0);
    if (kReadSizes.count(name) > 0) wait("size", name.substr(6), 0);
    if (!at::globalContext().deterministicAlgorithms()) return;
    // In deterministic mode CUDA sorts the indices and reads their range on the host, twice per index.
    int64_t indices = name == "aten::index_copy" || name == "aten::index_copy_" ? 1 : 0;
    if (puts && !(mask && fills) && !(given.size() > 4 && given[4].isBool() && given[4].toBool()))
      for (const auto& entry : given[1].toOptionalTensorVector()) indices += entry.has_value() && entry->defined();
    for (int64_t i = 0; i < 2 * indices; ++i) wait("deterministic", name.substr(6), 0);
    for (int64_t i = 0; indices > 0 && i < 6 * indices + 6; ++i) launch("aten::deterministic sort");
  }

  // The tensor of the caller that the operator has written, for a result that aliases an argument.
  IValue written(const c10::AliasInfo& info) const {
    for (size_t i = 0; i < given.size(); ++i) {
      const auto* alias = schema.arguments()[i].alias_info();
      if (alias == nullptr || !alias->isWrite() || alias->beforeSets() != info.beforeSets()) continue;
      if (given[i].isTensorList()) return given[i];
      at::Tensor original = given[i].toTensor();
      const bool moved = original.numel() > 0 && hosts[i].data_ptr() != original.data_ptr();
      if (original.sizes() != hosts[i].sizes() || moved) {
        at::native::resize_(original, hosts[i].sizes());
        if (hosts[i].numel() > 0) to_host(original).copy_(hosts[i]);
      }
      return original;
    }
    TORCH_CHECK(false, "The simulated device has no kernel for ", full);
  }

  void to_devices() {
    const auto& returns = schema.returns();
    const size_t start = stack->size() - returns.size();
    for (size_t i = 0; i < returns.size(); ++i) {
      IValue& value = (*stack)[start + i];
      const auto* info = returns[i].alias_info();
      if (info != nullptr && (value.isTensor() || value.isTensorList())) {
        TORCH_CHECK(info->isWrite(), "The simulated device has no view ", full);
        value = written(*info);
      } else if (value.isTensor()) {
        value = to_device(value.toTensor());
      } else if (value.isTensorList()) {
        auto list = value.toTensorVector();
        for (auto& tensor : list) tensor = to_device(tensor);
        value = IValue(c10::List<at::Tensor>(list));
      }
    }
  }
};

void on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Call call(op, stack);
  call.to_hosts();
  call.count();
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.to_devices();
}

// Memory and views.
at::Tensor empty(c10::IntArrayRef sizes, Dtype dtype, Layout, Where, Flag, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, allocator(), kKeys, c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, Dtype dtype, Layout, Where, Flag) {
  return at::detail::empty_strided_generic(sizes, strides, allocator(), kKeys, c10::dtype_or_default(dtype));
}
struct NoMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t) override { return {nullptr, nullptr, [](void*) {}, kDevice}; }
  void copy_data(void*, const void*, std::size_t) const override {}
};
at::Tensor zero_tensor(c10::IntArrayRef sizes, Dtype dtype, Layout, Where, Flag) {
  static NoMemory none;
  const c10::DispatchKeySet keys({c10::DispatchKey::PrivateUse1, c10::DispatchKey::ZeroTensor});
  return at::detail::empty_generic(sizes, &none, keys, c10::dtype_or_default(dtype), std::nullopt);
}
at::Tensor as_strided(const at::Tensor& self, Sizes sizes, Sizes strides, std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, sizes, strides, offset);
}
const at::Tensor& resize_(const at::Tensor& self, Sizes sizes, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(sizes), format);
}
at::Tensor reshape_alias(const at::Tensor& self, Sizes sizes, Sizes strides) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides));
}
at::Tensor view(const at::Tensor& self, Sizes sizes) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(sizes)); }
at::Tensor unfold(const at::Tensor& self, int64_t axis, int64_t size, int64_t step) {
  return at::native::unfold(self, axis, size, step);
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) { return at::native::set_tensor_(self, source); }
at::Tensor& set_storage(at::Tensor& self, at::Storage source) { return at::native::set_(self, source); }
at::Tensor& set_offset(at::Tensor& self, at::Storage s, int64_t at, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return at::cpu::set_(self, s, at, sizes, strides);
}

// Copies: torch waits for every copy from or to the host that is not asynchronous.
at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  const auto size = static_cast<int64_t>(target.nbytes());
  if (ours(self) && ours(target)) {
    launch("aten::copy_");
  } else if (!non_blocking || !ours(target)) {
    wait(ours(target) ? "h2d" : "d2h", "copy_", size);
  }
  to_host(target).copy_(to_host(self));
  return target;
}
at::Tensor copy_and_resize(const at::Tensor& self, const at::Tensor& target) {
  at::native::resize_(target, self.sizes());
  return copy_from(self, target, false);
}
at::Scalar item(const at::Tensor& self) {
  wait("item", "item", static_cast<int64_t>(self.nbytes()));
  return to_host(self).item();
}

// Kernels that the CPU lacks or names differently.
std::tuple<at::Tensor, at::Tensor> gru(
    const at::Tensor& inputs, const at::Tensor& hidden, const at::Tensor& state, const Maybe& b0, const Maybe& b1) {
  launch("aten::_thnn_fused_gru_cell");
  auto a = to_host(inputs), b = to_host(hidden), h = to_host(state);
  if (to_host(b0).defined()) a = a + to_host(b0), b = b + to_host(b1);
  auto x = a.chunk(3, 1), y = b.chunk(3, 1);
  auto reset = (x[0] + y[0]).sigmoid(), update = (x[1] + y[1]).sigmoid(), fresh = (x[2] + reset * y[2]).tanh();
  return {to_device(fresh + update * (h - fresh)), to_device(at::cat({reset, update, fresh, h, y[2]}, 1))};
}
using Five = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
Five gru_backward(const at::Tensor& grad, const at::Tensor& workspace, bool bias) {
  launch("aten::_thnn_fused_gru_cell_backward");
  auto g = to_host(grad);
  auto w = to_host(workspace).chunk(5, 1);
  auto &reset = w[0], &update = w[1], &fresh = w[2], &h = w[3], &hidden = w[4];
  auto d_fresh = g * (1 - update) * (1 - fresh * fresh), d_update = g * (h - fresh) * update * (1 - update);
  auto d_reset = d_fresh * hidden * reset * (1 - reset);
  auto inputs = at::cat({d_reset, d_update, d_fresh}, 1), states = at::cat({d_reset, d_update, d_fresh * reset}, 1);
  auto sum = [bias](const at::Tensor& t) { return bias ? to_device(t.sum(0)) : at::Tensor(); };
  return {to_device(inputs), to_device(states), to_device(g * update), sum(inputs), sum(states)};
}
using Three = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
Three lstm(const at::Tensor& inputs, const at::Tensor& hidden, const at::Tensor& cell, const Maybe& b0, const Maybe& b1) {
  launch("aten::_thnn_fused_lstm_cell");
  auto sum = to_host(inputs) + to_host(hidden);
  if (to_host(b0).defined()) sum = sum + to_host(b0) + to_host(b1);
  auto x = sum.chunk(4, 1);
  auto in = x[0].sigmoid(), forget = x[1].sigmoid(), fresh = x[2].tanh(), out = x[3].sigmoid();
  auto next = forget * to_host(cell) + in * fresh;
  return {to_device(out * next.tanh()), to_device(next), to_device(at::cat({in, forget, fresh, out}, 1))};
}
Three lstm_backward(
    const Maybe& grad_h, const Maybe& grad_c, const at::Tensor& before, const at::Tensor& after, const at::Tensor& workspace,
    bool bias) {
  launch("aten::_thnn_fused_lstm_cell_backward_impl");
  auto w = to_host(workspace).chunk(4, 1);
  auto &in = w[0], &forget = w[1], &fresh = w[2], &out = w[3];
  auto c0 = to_host(before), squashed = to_host(after).tanh(), zero = at::zeros_like(squashed);
  auto dh = to_host(grad_h).defined() ? to_host(grad_h) : zero;
  auto dc = to_host(grad_c).defined() ? to_host(grad_c) : zero;
  dc = dc + dh * out * (1 - squashed * squashed);
  auto d_in = dc * fresh * in * (1 - in), d_forget = dc * c0 * forget * (1 - forget);
  auto d_fresh = dc * in * (1 - fresh * fresh), d_out = dh * squashed * out * (1 - out);
  auto gates = at::cat({d_in, d_forget, d_fresh, d_out}, 1);
  return {to_device(gates), to_device(dc * forget), bias ? to_device(gates.sum(0)) : at::Tensor()};
}
at::Tensor convolution(
    const at::Tensor& x, const at::Tensor& w, const Maybe& bias, Sizes stride, Sizes pad, Sizes dilation, bool transposed,
    Sizes output_pad, c10::SymInt groups) {
  for (const auto& tensor : {x, w}) TORCH_CHECK(ours(tensor), "Expected all tensors to be on the same device, found cpu");
  launch("aten::convolution");
  return to_device(at::convolution_symint(
      to_host(x), to_host(w), to_host(bias), stride, pad, dilation, transposed, output_pad, groups));
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& x, const at::Tensor& w, Sizes stride, Sizes pad, Sizes dilation,
    bool transposed, Sizes output_pad, c10::SymInt groups, std::array<bool, 3> mask) {
  launch("aten::convolution_backward");
  std::vector<c10::SymInt> bias{w.sym_size(transposed ? 1 : 0) * (transposed ? groups : c10::SymInt(1))};
  auto [dx, dw, db] = at::convolution_backward_symint(
      to_host(grad), to_host(x), to_host(w), at::OptionalSymIntArrayRef(Sizes(bias)), stride, pad, dilation, transposed,
      output_pad, groups, mask);
  return {to_device(dx), to_device(dw), to_device(db)};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_host>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_efficientzerotensor", &zero_tensor);
  m.impl("as_strided", &as_strided);
  m.impl("resize_", &resize_);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("view", &view);
  m.impl("unfold", &unfold);
  m.impl("view_as_real", [](const at::Tensor& self) { return at::native::view_as_real(self); });
  m.impl("view_as_complex", [](const at::Tensor& self) { return at::native::view_as_complex(self); });
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_.source_Storage", &set_storage);
  m.impl("set_.source_Storage_storage_offset", &set_offset);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("_thnn_fused_gru_cell", &gru);
  m.impl("_thnn_fused_gru_cell_backward", &gru_backward);
  m.impl("_thnn_fused_lstm_cell", &lstm);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_backward);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(baddbmm, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
}

}  // namespace

void configure(const std::vector<std::string>& scalars, const std::vector<std::string>& single_launch) {
  accept_scalars = {scalars.begin(), scalars.end()};
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const auto& name : single_launch)
    library->impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&on_host>());
}

}  // namespace simulated
