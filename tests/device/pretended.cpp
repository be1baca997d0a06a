// A device for torch that is only pretended: its memory is of a type of its own, and the CPU does
// the work. Programs that mix it with the CPU fail as on a GPU, and what they ask of it is counted:
// "operation NAME" (about one kernel each), "look NAME" (the host waits for a value or a copy) and
// "sent" (a copy to the device).
//
// Each operation is done by torch's own fallback, which copies its arguments to the CPU and its
// results back. What that fallback cannot do stands here: memory, copies, and views, which share
// memory and so must not be copied.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_cpu_dispatch.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_cpu_dispatch.h>
#include <ATen/ops/view_as_complex_cpu_dispatch.h>
#include <ATen/ops/view_as_real_cpu_dispatch.h>
#include <ATen/ops/view_cpu_dispatch.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstring>
#include <mutex>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
const c10::Device the_device(kType, 0);

// ---------------------------------------------------------------- counting

std::mutex guarding;
c10::Dict<std::string, int64_t> counts;
thread_local int depth = 0;  // what an operation does inside is not counted

struct Counted {
  explicit Counted(const std::string& what) {
    if (depth++) return;
    std::lock_guard<std::mutex> held(guarding);
    counts.insert_or_assign(what, counts.contains(what) ? counts.at(what) + 1 : 1);
  }
  ~Counted() { --depth; }
};

c10::Dict<std::string, int64_t> take_counts() {
  std::lock_guard<std::mutex> held(guarding);
  auto taken = counts.copy();
  counts.clear();
  return taken;
}

// ---------------------------------------------------------------- memory, streams, randomness

void give_back(void* memory) { std::free(memory); }

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* memory = bytes ? std::malloc(bytes) : nullptr;
    TORCH_CHECK(memory || !bytes, "the pretended device has no ", bytes, " bytes");
    return {memory, memory, &give_back, the_device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
} allocator;
REGISTER_ALLOCATOR(kType, &allocator);

struct OneDevice final : c10::impl::NoOpDeviceGuardImpl<kType> {
  c10::Device getDevice() const override { return the_device; }
  c10::Device exchangeDevice(c10::Device) const override { return the_device; }
  c10::Stream getStream(c10::Device) const noexcept override { return only(); }
  c10::Stream getDefaultStream(c10::Device) const override { return only(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return only(); }
  static c10::Stream only() { return c10::Stream(c10::Stream::DEFAULT, the_device); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, OneDevice);

struct Generator final : at::CPUGeneratorImpl {
  Generator() {
    device_ = the_device;
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

void resize_storage(const c10::Storage& storage, size_t bytes) {
  auto fresh = allocator.allocate(bytes);
  if (auto kept = std::min(bytes, storage.nbytes())) std::memcpy(fresh.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(fresh));
  storage.set_nbytes(bytes);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  at::Device getDeviceFromPtr(void*) const override { return the_device; }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::make_generator<Generator>();
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    static const auto only = at::make_generator<Generator>();
    return only;
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
} hooks;
const bool hooked = (at::RegisterPrivateUse1HooksInterface(&hooks), true);

// ---------------------------------------------------------------- tensors and copies

using Layout = std::optional<c10::Layout>;
using Where = std::optional<c10::Device>;
using Dtype = std::optional<c10::ScalarType>;
using Sizes = c10::IntArrayRef;
const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);

at::Tensor empty(Sizes sizes, Dtype dtype, Layout, Where, std::optional<bool>,
                 std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(sizes, &allocator, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(Sizes sizes, Sizes strides, Dtype dtype, Layout, Where,
                         std::optional<bool>) {
  return at::detail::empty_strided_generic(sizes, strides, &allocator, keys,
                                           c10::dtype_or_default(dtype));
}

// The same numbers in the same memory, as the CPU's.
at::Tensor seen_by_cpu(const at::Tensor& x) {
  if (!x.is_privateuseone()) return x;
  return at::from_blob(x.storage().mutable_data(), x.sizes(), x.strides(), x.storage_offset(),
                       [kept = x](void*) {}, at::TensorOptions().dtype(x.dtype()), at::kCPU);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  const bool leaves = !to.is_privateuseone(), comes = !from.is_privateuseone();
  Counted copy(leaves ? "look copy" : comes ? "sent" : "operation aten::copy_");
  c10::impl::ExcludeDispatchKeyGuard no_derivative(c10::autograd_dispatch_keyset);
  TORCH_CHECK(!from.is_conj() && !from.is_neg(), "lazy conjugates and signs are not pretended");
  seen_by_cpu(to).copy_(seen_by_cpu(from));
  return to;
}

const at::Tensor& resize(const at::Tensor& x, Sizes sizes, std::optional<c10::MemoryFormat>) {
  if (x.sizes() == sizes) return x;  // a view keeps its strides
  const auto bytes = (c10::multiply_integers(sizes) + x.storage_offset()) * x.itemsize();
  if (x.storage().nbytes() < bytes) resize_storage(x.storage(), bytes);
  x.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return x;
}

// How torch's fallback brings back what an operation wrote in place.
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  return copy_from(from, resize(to, from.sizes(), std::nullopt), false);
}

at::Scalar local_scalar_dense(const at::Tensor& x) {
  Counted look("look item");
  return at::_local_scalar_dense(seen_by_cpu(x));
}

// As on a GPU, tensors of the CPU are refused beside those of the device, but for single numbers
// and for indices (an optional list). torch's fallback alone would accept them in lists.
void check_devices(const c10::OperatorHandle& operation, const torch::jit::Stack& stack) {
  bool ours = false, others = false;
  auto see = [&](const at::Tensor& x) {
    ours |= x.defined() && x.is_privateuseone();
    others |= x.defined() && !x.is_privateuseone() && x.dim() > 0;
  };
  for (const auto& argument : stack) {
    if (argument.isTensor()) see(argument.toTensor());
    if (argument.isTensorList())
      for (const auto& one : argument.toTensorVector()) see(one);
  }
  TORCH_CHECK(!(ours && others), operation.schema().name(),
              ": expected all tensors to be on the same device, but found the CPU's");
}

void fallback(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  check_devices(operation, *stack);
  Counted kernel("operation " + operation.schema().name());
  for (auto& argument : *stack)
    if (argument.isGenerator() && argument.toGenerator().device() == the_device)
      argument = at::detail::getDefaultCPUGenerator();
  at::native::cpu_fallback(operation, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("resize_", resize);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("_local_scalar_dense", local_scalar_dense);
  library.impl("as_strided", TORCH_FN(at::cpu::as_strided));
  library.impl("view", TORCH_FN(at::cpu::view));
  library.impl("_reshape_alias", TORCH_FN(at::cpu::_reshape_alias));
  library.impl("view_as_real", TORCH_FN(at::cpu::view_as_real));
  library.impl("view_as_complex", TORCH_FN(at::cpu::view_as_complex));
  library.impl("unfold", TORCH_FN(at::cpu::unfold));
  library.impl("set_.source_Storage", [](at::Tensor& x, at::Storage memory) -> at::Tensor& {
    return at::cpu::set_(x, std::move(memory));
  });
  library.impl("set_.source_Storage_storage_offset",
               [](at::Tensor& x, at::Storage memory, int64_t offset, Sizes sizes,
                  Sizes strides) -> at::Tensor& {
                 return at::cpu::set_(x, std::move(memory), offset, sizes, strides);
               });
}

TORCH_LIBRARY(pretended, library) {
  library.def("take_counts() -> Dict(str, int)", &take_counts);
}

}  // namespace
