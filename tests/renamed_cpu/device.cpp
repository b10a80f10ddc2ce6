// A device of torch's PrivateUse1 backend whose memory is the host's and whose kernels are the CPU's.
//
// Its tensors are of another device all the same: an operation on one of them and a CPU tensor fails, as on an
// accelerator. Streams and events are empty.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstring>

namespace {

using at::Tensor;

constexpr auto KIND = c10::DeviceType::PrivateUse1;
const c10::Device DEVICE(KIND, 0);
const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);

// A pointer of the device to memory that `owner` keeps.
template <class Owner>
c10::DataPtr on_device(void* data, Owner owner) {
  auto* context = new Owner(std::move(owner));
  return {data, context, [](void* held) { delete static_cast<Owner*>(held); }, DEVICE};
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto host = std::make_shared<c10::DataPtr>(c10::GetCPUAllocator()->allocate(size));
    void* data = host->get();
    return on_device(data, std::move(host));
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }
  void copy_data(void* target, const void* source, size_t size) const override {
    std::memcpy(target, source, size);
  }
};

Memory memory;
REGISTER_ALLOCATOR(KIND, &memory);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<KIND> {
  c10::Device exchangeDevice(c10::Device) const override {
    return DEVICE;
  }
  c10::Device getDevice() const override {
    return DEVICE;
  }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, DEVICE);
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return c10::Stream(c10::Stream::DEFAULT, DEVICE);
  }
  c10::Stream exchangeStream(c10::Stream) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, DEVICE);
  }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override {
    return true;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return true;
  }
  c10::DeviceIndex deviceCount() const override {
    return 1;
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return 0;
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override {
    return 0;
  }
  bool isPinnedPtr(const void*) const override {
    return true;
  }
  at::Allocator* getPinnedMemoryAllocator() const override {
    return c10::GetCPUAllocator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto data = memory.allocate(size);
    std::memcpy(data.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(size);
  }
};

const int registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return 0;
}();

// The same elements as a CPU tensor.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) {
    return tensor;
  }
  void* data = tensor.numel() == 0 ? nullptr : tensor.data_ptr();
  return at::for_blob(data, tensor.sizes())
      .strides(tensor.strides())
      .deleter([tensor](void*) {})
      .options(tensor.options().device(c10::kCPU))
      .target_device(c10::kCPU)
      .resizeable_storage()
      .allocator(c10::GetCPUAllocator())
      .make_tensor();
}

// The same elements, which a CPU kernel made, as a tensor of the device.
Tensor moved(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cpu()) {
    return tensor;
  }
  const c10::Storage& host = tensor.storage();
  auto storage = c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), host.nbytes(), on_device(host.mutable_data(), host), &memory, true);
  auto result = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), KEYS, tensor.dtype());
  result.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return result;
}

// Arguments of one call: CPU tensors in place of the device's.
struct Call {
  const c10::OperatorHandle& op;
  std::vector<std::pair<Tensor, Tensor>> pairs = {};  // of the device, on the host

  Tensor replace(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_privateuseone()) {
      TORCH_CHECK(
          !tensor.defined() || tensor.dim() == 0,
          op.schema().operator_name(), " got a CPU tensor beside tensors of the device");
      return tensor;
    }
    pairs.emplace_back(tensor, on_host(tensor));
    return pairs.back().second;
  }

  // Of an operation in place its own tensor, resized as the CPU's was.
  Tensor restore(const Tensor& tensor) const {
    for (const auto& [own, host] : pairs) {
      if (host.is_same(tensor)) {
        if (host.sizes() != own.sizes()) {
          Tensor resized = moved(host);
          own.unsafeGetTensorImpl()->set_storage_keep_dtype(resized.storage());
          own.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
        }
        return own;
      }
    }
    return moved(tensor);
  }

  template <class Change>
  static c10::IValue changed(const c10::IValue& value, const Change& change) {
    if (value.isTensor()) {
      return change(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorList()) {
        list.push_back(change(tensor));
      }
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (std::optional<Tensor> tensor : value.toOptionalTensorList()) {
        list.push_back(tensor ? std::optional<Tensor>(change(*tensor)) : std::nullopt);
      }
      return list;
    }
    if (value.isList()) {
      c10::impl::GenericList list(value.toList().elementType());
      for (const c10::IValue& element : value.toListRef()) {
        list.push_back(changed(element, change));
      }
      return list;
    }
    return value.isDevice() ? c10::IValue(c10::Device(c10::kCPU)) : value;
  }
};

// Any operation, by the CPU's kernel.
void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string& name = op.schema().name();
  TORCH_CHECK(
      name != "aten::special_entr" && name != "aten::bincount",
      name, " has no kernel on an NPU's cores: torch_npu 2.10 takes it to the host, or CANN to the AI CPU");
  Call call{op};
  const size_t first = stack->size() - op.schema().arguments().size();
  for (size_t place = first; place < stack->size(); ++place) {
    (*stack)[place] = Call::changed((*stack)[place], [&](const Tensor& tensor) { return call.replace(tensor); });
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  for (size_t place = first; place < stack->size(); ++place) {
    (*stack)[place] = Call::changed((*stack)[place], [&](const Tensor& tensor) { return call.restore(tensor); });
  }
}

Tensor empty(
    c10::SymIntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &memory, KEYS, c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory, KEYS, c10::dtype_or_default(dtype));
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool) {
  on_host(target).copy_(on_host(source));
  return target;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

Tensor view(const Tensor& tensor, c10::SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

Tensor as_strided(
    const Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

Tensor reshape_alias(const Tensor& tensor, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

const Tensor& resize(const Tensor& tensor, c10::SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  return at::native::resize_(tensor, C10_AS_INTARRAYREF_SLOW(size), format);
}

Tensor& set_storage(
    Tensor& tensor, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(
      tensor, std::move(source), offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("view", &view);
  m.impl("as_strided", &as_strided);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("_has_compatible_shallow_copy_type", [](const Tensor&, const Tensor&) { return true; });  // as torch_npu
  m.impl("record_stream", [](Tensor&, at::Stream) {});
}

// Collectives of torch.distributed, by the group's CPU backend.
TORCH_LIBRARY_IMPL(c10d, PrivateUse1, m) {
  for (const char* name :
       {"allreduce_", "allreduce_coalesced_", "broadcast_", "_allgather_base_", "allgather_", "reduce_scatter_",
        "_reduce_scatter_base_", "allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_",
        "alltoall_base_", "barrier", "send", "recv_"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
  }
}

}  // namespace
