// A device "cuda:0" in host memory for a CPU build of torch.
//
// The dispatcher, autograd with its threads, views, streams and events treat it as a CUDA device. Its kernels are the
// CPU's, on aliases of the same memory. Its collectives are those of the group's CPU backend (gloo, fake).
// Callbacks report every kernel with its stream and the bytes that it reads and writes, every wait of a stream or the
// host, and every allocation and release of memory. tests/hostcuda/checker.py evaluates the reports.
//
// The library must be loaded before torch (LD_PRELOAD), because it replaces functions that torch defines too.

#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>

#include <atomic>
#include <cstring>
#include <ctime>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace {

using c10::Device, c10::DeviceIndex, c10::DeviceType, c10::DispatchKey, c10::OperatorHandle, c10::Storage, c10::Stream;
using torch::jit::Stack;

const Device DEVICE(DeviceType::CUDA, 0);
const Device HOST(DeviceType::CPU);

// Reports to Python --------------------------------------------------------------------------------------------------

struct Callbacks {
  // A kernel ran: its operator, its stream, and `count` ranges of bytes [from, to) of the memory that begins at `base`
  void (*kernel)(const char* op, int64_t stream, int64_t count, const int64_t* base, const int64_t* from,
                 const int64_t* to, const int64_t* writes) = nullptr;
  // The host waited for its stream
  void (*synchronized)(const char* op) = nullptr;
  void (*allocated)(int64_t base, int64_t stream) = nullptr;
  void (*freed)(int64_t base) = nullptr;
  // A stream recorded an event, or waits for one
  void (*recorded)(int64_t event, int64_t stream) = nullptr;
  void (*waited)(int64_t event, int64_t stream) = nullptr;
  // Memory is kept until a stream has done what was queued on it
  void (*kept)(int64_t base, int64_t stream) = nullptr;
  // A stream for collectives was created
  void (*named)(int64_t stream, const char* name) = nullptr;
  // The host starts a collective on tensors of this many bytes in all
  void (*launched)(const char* op, int64_t bytes) = nullptr;
} python;

// The CPU time of this thread, and its part inside the device's kernels, collectives and reports
int64_t thread_ns() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

class Inside {
 public:
  Inside() {
    if (!depth++) begin = thread_ns();
  }
  ~Inside() {
    if (!--depth) total += thread_ns() - begin;
  }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

  static int64_t outside() { return (depth ? begin : thread_ns()) - total; }

 private:
  inline static thread_local int64_t total = 0, begin = 0, depth = 0;
};

thread_local int64_t queued = 0;  // Kernels and collectives of this thread

thread_local int64_t current_stream = 0;
std::atomic<int64_t> next_event{1 << 20}, next_stream{1 << 10};

void record(int64_t event, int64_t stream) {
  if (python.recorded) python.recorded(event, stream);
}

void wait(int64_t event, int64_t stream) {
  if (python.waited) python.waited(event, stream);
}

int64_t base_of(const at::Tensor& tensor) { return reinterpret_cast<int64_t>(tensor.storage().data()); }

// The device ---------------------------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return DEVICE; }
  Device getDevice() const override { return DEVICE; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  DeviceIndex deviceCount() const noexcept override { return 1; }

  static Stream stream(int64_t id) { return Stream(Stream::UNSAFE, DEVICE, id); }
  Stream getStream(Device) const override { return stream(current_stream); }
  Stream getDefaultStream(Device) const override { return stream(0); }
  Stream exchangeStream(Stream next) const override {
    const auto before = current_stream;
    current_stream = next.id();
    return stream(before);
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}

  void record(void** event, const Stream& on, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = reinterpret_cast<void*>(next_event++);
    ::record(reinterpret_cast<int64_t>(*event), on.id());
  }
  void block(void* event, const Stream& on) const override {
    if (event) ::wait(reinterpret_cast<int64_t>(event), on.id());
  }
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& on) const override {
    if (python.kept) python.kept(reinterpret_cast<int64_t>(data.get()), on.id());
  }
};

}  // namespace

namespace at {

// Pinned host memory, which the device can read directly
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    auto data = c10::GetCPUAllocator()->allocate(bytes);
    auto* kept = new c10::DataPtr(std::move(data));
    const std::lock_guard lock(mutex);
    pinned[reinterpret_cast<uintptr_t>(kept->get())] = bytes;
    return {kept->get(), kept, &free, c10::Device(c10::DeviceType::CPU)};
  }
  static void free(void* it) {
    auto* data = static_cast<c10::DataPtr*>(it);
    {
      const std::lock_guard lock(mutex);
      pinned.erase(reinterpret_cast<uintptr_t>(data->get()));
    }
    delete data;
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

  static bool holds(const void* it) {
    const std::lock_guard lock(mutex);
    const auto after = pinned.upper_bound(reinterpret_cast<uintptr_t>(it));
    if (after == pinned.begin()) return false;
    const auto& [begin, bytes] = *std::prev(after);
    return reinterpret_cast<uintptr_t>(it) < begin + bytes;
  }
  inline static std::mutex mutex;
  inline static std::map<uintptr_t, size_t> pinned;
};

// torch looks up CUDA's hooks by this name
struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  bool isAvailable() const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  const Generator& getDefaultGenerator(DeviceIndex) const override { return globalContext().defaultGenerator(HOST); }
  bool isPinnedPtr(const void* it) const override { return PinnedAllocator::holds(it); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static PinnedAllocator allocator;
    return &allocator;
  }
  Generator getNewGenerator(DeviceIndex) const override { return globalContext().defaultGenerator(HOST).clone(); }
};
REGISTER_CUDA_HOOKS(CUDAHooks);

namespace accelerator {
std::optional<c10::DeviceType> getAccelerator(bool) { return c10::DeviceType::CUDA; }
}  // namespace accelerator

}  // namespace at

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
}

namespace {

// Memory: every storage of the device is a host storage under another name --------------------------------------------

at::Tensor on_storage(Storage storage, c10::DispatchKeySet keys, const at::Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  if (like.is_conj()) tensor._set_conj(true);
  return tensor;
}

// A host tensor of the same memory, which it keeps alive
at::Tensor host_alias(const at::Tensor& tensor) {
  auto* kept = new Storage(tensor.storage());
  c10::DataPtr data(kept->mutable_data(), kept, [](void* it) { delete static_cast<Storage*>(it); }, HOST);
  Storage storage(Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(data), c10::GetDefaultCPUAllocator(),
                  /*resizable=*/true);
  return on_storage(std::move(storage), c10::DispatchKeySet(DispatchKey::CPU), tensor);
}

// The memory of a host tensor as a storage of the device
Storage device_storage(const at::Tensor& host) {
  auto* owner = new at::Tensor(host.detach());
  const auto free = [](void* it) {
    auto* tensor = static_cast<at::Tensor*>(it);
    if (python.freed) python.freed(base_of(*tensor));
    delete tensor;
  };
  if (python.allocated) python.allocated(base_of(*owner), current_stream);
  c10::DataPtr data(owner->storage().mutable_data(), owner, free, DEVICE);
  return Storage(Storage::use_byte_size_t(), host.storage().nbytes(), std::move(data), nullptr, false);
}

bool is_on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().is_cuda(); }

// An operator's arguments while its kernel runs on the host
class Call {
 public:
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // (device tensor, host tensor)
  std::vector<int64_t> base, from, to, writes;

  c10::IValue on_host(const c10::IValue& value, bool write) {
    if (value.isTensor()) return alias(value.toTensor(), write);
    if (value.isTensorList()) {
      c10::List<at::Tensor> found;
      for (const at::Tensor tensor : value.toTensorList()) found.push_back(alias(tensor, write));
      return found;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> found;
      for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList())
        found.push_back(tensor ? std::optional<at::Tensor>(alias(*tensor, write)) : tensor);
      return found;
    }
    if (value.isList() && value.toList().elementType()->kind() == c10::TypeKind::ListType) {
      c10::List<c10::List<at::Tensor>> found;
      for (const c10::IValue inner : value.toList()) found.push_back(on_host(inner, write).toTensorList());
      return found;
    }
    return value;
  }

  void report(const std::string& name, int64_t stream) const {
    queued += !base.empty();
    if (python.kernel && !base.empty())
      python.kernel(name.c_str(), stream, base.size(), base.data(), from.data(), to.data(), writes.data());
  }

  void note(const at::Tensor& tensor, bool write) {
    if (!tensor.numel()) return;
    int64_t last = tensor.storage_offset();
    for (int64_t dim = 0; dim < tensor.dim(); dim++) last += (tensor.size(dim) - 1) * tensor.stride(dim);
    const auto size = static_cast<int64_t>(tensor.itemsize());
    base.push_back(base_of(tensor));
    from.push_back(tensor.storage_offset() * size);
    to.push_back((last + 1) * size);
    writes.push_back(write);
  }

 private:
  at::Tensor alias(const at::Tensor& tensor, bool write) {
    if (!is_on_device(tensor)) return tensor;
    note(tensor, write);
    for (auto& [device, host] : pairs)
      if (device.unsafeGetTensorImpl() == tensor.unsafeGetTensorImpl()) return host;
    pairs.emplace_back(tensor, host_alias(tensor));
    return pairs.back().second;
  }
};

// Kernels ------------------------------------------------------------------------------------------------------------

// Operators for whose results CUDA makes the host wait
const std::set<std::string> WAITING{"aten::_local_scalar_dense", "aten::nonzero",  "aten::masked_select",
                                    "aten::equal",               "aten::_unique2", "aten::unique_dim",
                                    "aten::unique_consecutive",  "aten::bincount", "aten::is_nonzero"};
// Operators that take host tensors along with device tensors
const std::set<std::string> MIXING{"aten::copy_", "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::set_"};

bool begins_with(const std::string& name, const char* prefix) { return name.rfind(prefix, 0) == 0; }

void check_devices(const std::string& name, const at::ArrayRef<c10::IValue> arguments) {
  if (MIXING.count(name)) return;
  const auto check = [&](const at::Tensor& tensor) {
    TORCH_CHECK(!tensor.defined() || !tensor.dim() || !tensor.device().is_cpu(),
                "Expected all tensors to be on the same device, but ", name, " got one of ", tensor.sizes(),
                " in host memory");
  };
  for (const auto& value : arguments) {
    if (value.isTensor()) check(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor tensor : value.toTensorList()) check(tensor);
  }
}

// What CUDA makes the host wait for in this operator: its result, or a copy from or to host memory
const char* wait_in(const std::string& name, const at::ArrayRef<c10::IValue> arguments) {
  if (WAITING.count(name)) return name.c_str();
  if (begins_with(name, "aten::index") && arguments[1].isOptionalTensorList())
    for (const std::optional<at::Tensor> index : arguments[1].toOptionalTensorList()) {
      if (!index || !index->defined()) continue;
      if (!is_on_device(*index)) return "copy host to device";
      if (index->scalar_type() == at::kBool) return "aten::nonzero";
    }
  if (name != "aten::copy_" || arguments[2].toBool()) return nullptr;
  const bool to_device = is_on_device(arguments[0].toTensor()), from_device = is_on_device(arguments[1].toTensor());
  if (to_device == from_device) return nullptr;
  return to_device ? "copy host to device" : "copy device to host";
}

bool is_view(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns())
    if (!result.alias_info() || result.alias_info()->isWrite()) return false;
  return !schema.returns().empty();
}

// A view, whose CPU kernel knows nothing of devices
void view(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  op.callBoxedForDispatchKey(DispatchKey::CPU, *stack);
}

void kernel(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const Inside inside;
  const auto& schema = op.schema();
  const auto& name = schema.operator_name().name;
  const auto inputs = torch::jit::last(*stack, schema.arguments().size());
  check_devices(name, inputs);
  const char* waits = wait_in(name, inputs);
  const bool to_host = name == "aten::copy_" && !is_on_device(inputs[0].toTensor());
  const auto begin = stack->size() - inputs.size();
  Call call;
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    auto& value = (*stack)[begin + i];
    const auto& argument = schema.arguments()[i];
    if (value.isDevice()) value = HOST;
    else if (argument.name() == "pin_memory" && value.isBool()) value = false;
    else value = call.on_host(value, argument.alias_info() && argument.alias_info()->isWrite());
  }
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(stack);
  }
  // Apply the kernel's resizes and moves of host tensors to the device tensors
  for (auto& [device, host] : call.pairs) {
    auto* impl = device.unsafeGetTensorImpl();
    if (host.storage().data() != device.storage().data()) impl->set_storage_keep_dtype(device_storage(host));
    if (host.sizes() != device.sizes() || host.strides() != device.strides() ||
        host.storage_offset() != device.storage_offset())
      impl->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
  }
  const bool allocates = begins_with(name, "aten::empty");
  const auto on_device = [&](const at::Tensor& result) -> at::Tensor {
    if (!result.defined()) return result;
    for (auto& [device, host] : call.pairs)
      if (host.unsafeGetTensorImpl() == result.unsafeGetTensorImpl()) return device;
    for (auto& [device, host] : call.pairs)
      if (host.storage().data() == result.storage().data() && result.storage().nbytes())
        return on_storage(Storage(device.storage()), device.key_set(), result);
    auto tensor = on_storage(device_storage(result), c10::DispatchKeySet(DispatchKey::CUDA), result);
    if (!allocates) call.note(tensor, true);
    return tensor;
  };
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size() && !to_host; i++) {
    auto& value = (*stack)[i];
    if (value.isTensor()) value = on_device(value.toTensor());
    else if (value.isTensorList()) {
      c10::List<at::Tensor> found;
      for (const at::Tensor result : value.toTensorList()) found.push_back(on_device(result));
      value = found;
    }
  }
  if (!is_view(schema) && !allocates && !begins_with(name, "aten::set_") && !begins_with(name, "aten::resize"))
    call.report(name, current_stream);
  // After the kernel's report, because the wait includes the kernel
  if (waits && python.synchronized) python.synchronized(waits);
}

void keep_for_stream(const OperatorHandle&, c10::DispatchKeySet, Stack* stack) {
  const auto stream = torch::jit::pop(*stack).toStream();
  const auto tensor = torch::jit::pop(*stack).toTensor();
  if (python.kept) python.kept(base_of(tensor), stream.id());
}

// Off the fast path of `grouped_mm` (16-bit rows on new devices), torch computes one product for each group and reads
// the group sizes from the device. The operators that it calls come back here one by one.
void grouped_product(const OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  if (torch::jit::peek(*stack, 0, op.schema().arguments().size()).toTensor().scalar_type() == at::kBFloat16)
    return kernel(op, keys, stack);
  const Inside inside;
  op.callBoxedForDispatchKey(DispatchKey::CompositeExplicitAutograd, *stack);
}

// `addmm` of 16-bit matrices into float32, which only CUDA has: cuBLAS multiplies and adds in float32. The checks are
// those of `_addmm_dtype_out_cuda`.
at::Tensor& addmm_into(const at::Tensor& self, const at::Tensor& first, const at::Tensor& second, at::ScalarType dtype,
                       const at::Scalar& beta, const at::Scalar& alpha, at::Tensor& out) {
  const auto type = first.scalar_type();
  TORCH_CHECK(type == second.scalar_type(), "mat1 and mat2 must have the same dtype");
  TORCH_CHECK(dtype == type || (dtype == at::kFloat && (type == at::kHalf || type == at::kBFloat16)),
              "out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs");
  TORCH_CHECK(dtype == out.scalar_type(), "out_dtype must be the same as the dtype of the provided out tensor");
  TORCH_CHECK(dtype == self.scalar_type() || self.scalar_type() == type,
              "self dtype must match either out_dtype or mat1 dtype");
  return at::addmm_out(out, self.to(dtype), first.to(dtype), second.to(dtype), beta, alpha);
}

// Collectives, as NCCL does them -------------------------------------------------------------------------------------

// One stream for each group, and one for the messages between each pair of members
int64_t stream_of(const c10d::ProcessGroup& group, int64_t peer) {
  static std::mutex mutex;
  static std::map<std::string, int64_t> streams;
  auto name = group.getGroupDesc() + " " + group.getGroupName();
  if (peer >= 0) name += " messages with " + std::to_string(peer);
  const std::lock_guard lock(mutex);
  const auto [place, is_new] = streams.emplace(name, 0);
  if (is_new) {
    place->second = next_stream++;
    if (python.named) python.named(place->second, name.c_str());
  }
  return place->second;
}

// A stream that waits for the work continues once it is done; on a device, the host need not wait
class DeviceWork : public c10d::Work {
 public:
  DeviceWork(c10::intrusive_ptr<c10d::Work> work, int64_t event, int64_t stream, std::vector<int64_t> bases)
      : work_(std::move(work)), event_(event), stream_(stream), bases_(std::move(bases)) {}

  // NCCL's work keeps its tensors until it is done, even if nothing waits for it
  ~DeviceWork() override {
    for (const auto base : bases_)
      if (python.kept) python.kept(base, stream_);
  }

  bool wait(std::chrono::milliseconds timeout) override {
    const Inside inside;
    // In host memory, received data must have arrived before a kernel reads it
    const bool done = work_->wait(timeout);
    ::wait(event_, current_stream);
    return done;
  }
  void synchronize() override { wait(kNoTimeout); }
  bool isCompleted() override { return work_->isCompleted(); }
  bool isSuccess() const override { return work_->isSuccess(); }
  std::exception_ptr exception() const override { return work_->exception(); }

 private:
  c10::intrusive_ptr<c10d::Work> work_;
  int64_t event_, stream_;
  std::vector<int64_t> bases_;
};

void order(int64_t before, int64_t after) {
  if (before == after) return;
  const auto event = next_event++;
  record(event, before);
  wait(event, after);
}

// What an all-gather of a fake group returns for the other members, by the size of the whole result
std::map<size_t, std::string> answers;

// Complete the result of a collective of a fake group, of which this process is rank 0
void answer(const std::string& name, const at::Tensor& output) {
  const auto found = answers.find(output.nbytes());
  if (begins_with(name, "c10d::alltoall") || name == "c10d::recv_") output.zero_();
  if (name != "c10d::_allgather_base_" || found == answers.end()) return;
  const auto skipped = found->first - found->second.size();
  std::memcpy(static_cast<char*>(output.data_ptr()) + skipped, found->second.data(), found->second.size());
}

void collective(const OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const Inside inside;
  const auto& schema = op.schema();
  const auto& name = schema.operator_name().name;
  const auto begin = stack->size() - schema.arguments().size();
  const bool sends = name == "c10d::send";
  Call call;
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  int64_t peer = -1;
  bool asynchronous = true;
  c10::IValue outputs;
  for (size_t i = 0; i < schema.arguments().size(); i++) {
    auto& value = (*stack)[begin + i];
    const auto& argument = schema.arguments()[i].name();
    if (argument == "process_group") group = value.toCustomClass<c10d::ProcessGroup>();
    if (argument == "async_op") asynchronous = value.toBool();
    if (argument == "src" || argument == "dst") peer = value.toInt();
    const bool writes = begins_with(argument, "output") || (argument == "tensors" && !sends);
    if (i == 0) outputs = value;
    value = call.on_host(value, writes);
  }
  // Without `async_op`, NCCL uses the caller's stream
  const auto stream = asynchronous ? stream_of(*group, peer) : current_stream;
  order(current_stream, stream);
  int64_t bytes = 0;
  for (size_t i = 0; i < call.base.size(); i++) bytes += call.to[i] - call.from[i];
  if (python.launched) python.launched(name.c_str(), bytes);
  call.report(name, stream);
  op.callBoxed(stack);
  if (!call.pairs.empty() && group->getBackend(DeviceType::CPU)->getBackendName() == "fake") answer(name, call.pairs[0].second);
  auto& result = stack->back();
  const auto event = next_event++;
  record(event, stream);
  result = c10::IValue(c10::intrusive_ptr<c10d::Work>(
      c10::make_intrusive<DeviceWork>(result.toCustomClass<c10d::Work>(), event, stream, call.base)));
  if (name == "c10d::barrier" && python.synchronized) python.synchronized("barrier");
  if (schema.returns().size() > 1) (*stack)[stack->size() - 2] = outputs;
}

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>()); }

TORCH_LIBRARY_IMPL(aten, CPU, m) { m.impl("addmm.dtype_out", &addmm_into); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  // Composite operators that have a CPU kernel get a kernel here, too
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& op : dispatcher.getRegistrationsForDispatchKey(DispatchKey::CPU)) {
    if (!begins_with(op.name, "aten::") || op.name == "aten::_grouped_mm") continue;
    const auto name = c10::toString(op).substr(6);
    const auto handle = dispatcher.findOp(op);
    if (!handle || !handle->hasSchema() || !is_view(handle->schema()))
      m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&kernel>());
    else if (!handle->hasKernelForDispatchKey(DispatchKey::CompositeExplicitAutograd))
      m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&view>());
  }
  // torch's kernel serves all devices and would look for real CUDA functions
  m.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&kernel>());
  m.impl("record_stream", torch::CppFunction::makeFromBoxedFunction<&keep_for_stream>());
  m.impl("_grouped_mm", torch::CppFunction::makeFromBoxedFunction<&grouped_product>());
}

TORCH_LIBRARY_IMPL(c10d, CUDA, m) {
  // torch warns about registrations that replace its own
  struct Silence final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silence;
  const c10::WarningUtils::WarningHandlerGuard silent(&silence);
  for (const char* name :
       {"allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "allgather_", "_allgather_base_",
        "allgather_coalesced_", "allgather_into_tensor_coalesced_", "reduce_scatter_", "_reduce_scatter_base_",
        "reduce_scatter_tensor_coalesced_", "alltoall_", "alltoall_base_", "gather_", "scatter_", "send", "recv_", "barrier"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&collective>());
}

extern "C" {
void hostcuda_report_to(const Callbacks* callbacks) { python = *callbacks; }
void hostcuda_set_stream(int64_t stream) { current_stream = stream; }
int64_t hostcuda_stream() { return current_stream; }
int64_t hostcuda_outside() { return Inside::outside(); }
int64_t hostcuda_queued() { return queued; }
void hostcuda_answer(const char* data, int64_t bytes, int64_t total) { answers[total] = std::string(data, bytes); }
}
