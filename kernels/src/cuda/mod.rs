//! CUDA C++ kernels: compiled by NVRTC for the current device, and launched on CubeCL's stream in
//! order with its kernels.
//!
//! A kernel's source is with its operation, in a folder of its [family](Arch); [`HOPPER`] and
//! [`AMPERE`] are shared by those of a family.

mod ahead;
pub(crate) mod arch;

use std::any::Any;
use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt::Debug;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{LazyLock, Mutex, PoisonError};

use burn::cubecl::cuda::{CudaDevice, CudaRuntime};
use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::ComputeClient;
use cubecl::device::{Device, DeviceId};
use cubecl::ir::{ElemType, FloatKind, Scope};
use cubecl::prelude::*;
use cubecl::server::{Handle, KernelArguments, MetadataBindingInfo, TensorMapBinding, TensorMapMeta};
use cubecl::zspace::metadata::Metadata;
use cubecl::zspace::{Shape, Strides};
use cubecl::{CompilationError, Compiler, CubeTask};
use cubecl_cpp::shared::{Elem, Item, SharedMemory};
use cudarc::driver::result as driver;

pub(crate) use self::arch::{Arch, family, has_fast_tf32, is_forced, shared_bytes, takes};
use crate::cubecl::assert_reachable;
use crate::notices::{Level, notice};
use crate::rehearsal;

/// Shared source of kernels of all families.
pub(crate) const COMMON: &str = include_str!("include/common.cuh");
/// Shared source of kernels for Hopper: mbarriers, TMA, wgmma.
pub(crate) const HOPPER: &str = concat!(include_str!("include/common.cuh"), include_str!("include/hopper.cuh"));
/// The tile of GEMMs for Hopper, and its product.
pub(crate) const GEMM: &str = include_str!("include/gemm.cuh");
/// The largest logit and its token.
pub(crate) const LARGEST: (&str, &str) = ("largest.cuh", include_str!("include/largest.cuh"));
/// Numbers of [a dtype](dtype_number), or bytes, to f32 and back, and activations.
pub(crate) const NUMBERS: (&str, &str) = ("numbers.cuh", include_str!("include/numbers.cuh"));
/// Maximum shared memory of a block there, in bytes.
pub(crate) const HOPPER_SHARED_BYTES: usize = Arch::Sm90.targets()[0].shared_bytes;
/// Shared source of kernels for Ampere and later: `cp.async`, `mma`.
pub(crate) const AMPERE: &str = concat!(include_str!("include/common.cuh"), include_str!("include/ampere.cuh"));

type CudaCompiler = <CudaRuntime as Runtime>::Compiler;

/// Which variants of a kernel run on which devices, once tried.
pub(crate) type Tried<K> = Mutex<Option<HashMap<(DeviceId, K), bool>>>;

/// A CUDA C++ kernel with all compile-time values: equal values are one kernel.
pub(crate) trait CudaKernel: Clone + Debug + Eq + Hash + Send + Sync + 'static {
    /// Threads per block.
    fn threads(&self) -> u32;

    /// Its entry point.
    fn entry(&self) -> &'static str;

    /// Its complete source.
    fn source(&self) -> String;

    /// Bytes of dynamic shared memory, one `extern __shared__` array in the source.
    fn shared_bytes(&self) -> usize;

    /// The results of trials of its kind.
    fn tried() -> &'static Tried<Self>;
}

/// Length from which a kernel's name is cut: with a folder and an extension it names a file.
const MOST_NAME: usize = 160;

/// The name with compile-time values, `gemm_hopper-half-bf16-columns-128-..`, and the source.
pub(crate) fn named(kernel: impl CudaKernel) -> (String, String) {
    let debug = format!("{kernel:?}");
    let values = debug.split(|c: char| !c.is_ascii_alphanumeric() && c != '_').filter(|word| !word.is_empty());
    let mut name = [kernel.entry()].into_iter().chain(values.skip(1)).collect::<Vec<_>>().join("-");
    if name.len() > MOST_NAME {
        let mut hasher = DefaultHasher::new();
        name.hash(&mut hasher);
        name = format!("{}-{:016x}", &name[..MOST_NAME], hasher.finish());
    }
    (name, source(&kernel))
}

/// The macros that a source is compiled with.
pub(crate) fn defines<const N: usize>(values: [(&str, usize); N]) -> String {
    values.map(|(name, value)| format!("#define {name} {value}\n")).concat()
}

/// A source with each `#include "NAME"` replaced by the header of that name. Headers are replaced
/// in order, so one may include those that follow.
pub(crate) fn included(source: &str, headers: &[(&str, &str)]) -> String {
    let replaced =
        |source: String, (name, header): &(&str, &str)| source.replace(&format!("#include \"{name}\"\n"), header);
    headers.iter().fold(source.to_string(), replaced)
}

/// The source with its macros.
fn source(kernel: &impl CudaKernel) -> String {
    let racecheck = if for_racecheck() { "#define RACECHECK\n" } else { "" };
    racecheck.to_string() + &kernel.source()
}

/// A kernel in CubeCL's form.
struct Task<K>(K);

impl<K: CudaKernel> KernelMetadata for Task<K> {
    fn name(&self) -> &'static str {
        self.0.entry()
    }

    fn id(&self) -> KernelId {
        KernelId::new::<Self>().cube_dim(CubeDim::new_1d(self.0.threads())).info((self.0.clone(), for_racecheck()))
    }

    fn address_type(&self) -> StorageType {
        AddressType::U64.unsigned_type()
    }
}

impl<K: CudaKernel> CubeTask<CudaCompiler> for Task<K> {
    fn compile(
        &self,
        compiler: &mut CudaCompiler,
        options: &<CudaCompiler as Compiler>::CompilationOptions,
        mode: ExecutionMode,
        address_type: StorageType,
    ) -> Result<CompiledKernel<CudaCompiler>, CompilationError> {
        let cube_dim = CubeDim::new_1d(self.0.threads());
        let nothing = KernelDefinition {
            buffers: Vec::new(),
            tensor_maps: Vec::new(),
            scalars: Vec::new(),
            cube_dim,
            body: Scope::root(false),
            options: Default::default(),
        };
        // The launch only reads the size of shared memory from this.
        let mut repr = compiler.compile(nothing, options, mode, address_type)?;
        repr.body.shared_memories.push(SharedMemory::Array {
            index: 0,
            item: Item::scalar(Elem::U8, false),
            length: self.0.shared_bytes(),
            align: 1024,
            offset: 0,
        });
        Ok(CompiledKernel {
            entrypoint_name: self.0.entry().into(),
            debug_name: Some(self.0.entry()),
            source: source(&self.0),
            repr: Some(repr),
            cube_dim,
            debug_info: None,
        })
    }
}

/// Launch arguments. The kernel's parameters are in this order: tensor maps, the pointer of each
/// map, other pointers, and all words as one struct of `u64`.
#[derive(Default)]
pub(crate) struct Arguments {
    maps: Vec<TensorMapBinding>,
    pointers: Vec<cubecl::server::Binding>,
    words: Vec<u64>,
}

impl Arguments {
    /// A matrix accessed by TMA in boxes of `[outer, inner]` elements, with the 128-byte swizzle:
    /// `inner`, 128 bytes, runs along `axis`, whose stride is one; the other stride is a multiple
    /// of 16 bytes.
    pub(crate) fn map<R: CubeRuntime>(self, x: &CubeTensor<R>, axis: usize, outer: usize) -> Self {
        let (shape, strides) = (x.meta.shape(), x.meta.strides());
        self.map_boxes(x, 0, [shape[1 - axis], shape[axis]], [strides[1 - axis], 1], [outer, 128 / x.dtype.size()])
    }

    /// A tensor of these sizes and strides from element `first` on, accessed by TMA in such boxes.
    /// The last stride is one, the others are multiples of 16 bytes. Rows of 128 bytes are swizzled
    /// in shared memory, others are not. f32 is rounded to TF32 when read.
    pub(crate) fn map_boxes<R: CubeRuntime, const D: usize>(
        mut self,
        x: &CubeTensor<R>,
        first: usize,
        shape: [usize; D],
        strides: [usize; D],
        tile: [usize; D],
    ) -> Self {
        assert_reachable(x);
        let swizzled = tile.last().is_some_and(|row| row * x.dtype.size() == 128);
        let meta = TensorMapMeta {
            format: TensorMapFormat::Tiled(TiledArgs { tile_size: Shape::from(tile) }),
            metadata: Metadata::new(shape, strides),
            elem_stride: Strides::from([1; D].as_slice()),
            interleave: TensorMapInterleave::None,
            swizzle: if swizzled { TensorMapSwizzle::B128 } else { TensorMapSwizzle::None },
            prefetch: TensorMapPrefetch::B256,
            oob_fill: OobFill::Zero,
            storage_ty: match x.dtype {
                DType::F32 => ElemType::Float(FloatKind::TF32).into(),
                dtype => dtype.into(),
            },
        };
        let handle = x.handle.clone().offset_start((first * x.dtype.size()) as u64);
        self.maps.push(TensorMapBinding::new(handle.binding(), meta));
        self
    }

    /// A tensor's buffer.
    pub(crate) fn pointer<R: CubeRuntime>(mut self, x: &CubeTensor<R>) -> Self {
        assert_reachable(x);
        self.pointers.push(x.handle.clone().binding());
        self
    }

    /// A tensor's buffer from element `first` on.
    pub(crate) fn pointer_from<R: CubeRuntime>(mut self, x: &CubeTensor<R>, first: usize) -> Self {
        assert_reachable(x);
        let handle = x.handle.clone().offset_start((first * x.dtype.size()) as u64);
        self.pointers.push(handle.binding());
        self
    }

    /// Numbers, in order.
    pub(crate) fn words(self, words: impl IntoIterator<Item = u32>) -> Self {
        words.into_iter().fold(self, |arguments, word| arguments.word(word as usize))
    }

    /// A number.
    pub(crate) fn word(mut self, word: usize) -> Self {
        self.words.push(word as u64);
        self
    }
}

/// At least `count` zeroed `u32` flags on the same device, for kernels that leave them zeroed.
///
/// Kept per thread, whose launches are in one stream.
pub(crate) fn marks<R: CubeRuntime>(like: &CubeTensor<R>, count: usize) -> CubeTensor<R> {
    thread_local! {
        static KEPT: RefCell<HashMap<DeviceId, (usize, Handle)>> = RefCell::new(HashMap::new());
    }
    let create = |count: usize| (count, like.client.create_from_slice(&vec![0; count * 4]));
    let (count, handle) = KEPT.with_borrow_mut(|kept| {
        let most = kept.entry(like.device.to_id()).or_insert_with(|| create(count.next_power_of_two()));
        if most.0 < count {
            *most = create(count.next_power_of_two());
        }
        most.clone()
    });
    CubeTensor::new_contiguous(like.client.clone(), like.device.clone(), [count].into(), handle, DType::U32)
}

/// Whether kernels are compiled for compute-sanitizer's racecheck (`FIRECLAY_RACECHECK=1`). At an
/// mbarrier it only tracks each thread's own arrival, not one lane's after `__syncwarp`; and it
/// fails where blocks read each other's shared memory.
pub(crate) fn for_racecheck() -> bool {
    static ASKED: LazyLock<bool> = LazyLock::new(|| std::env::var_os("FIRECLAY_RACECHECK").is_some_and(|it| it == "1"));
    *ASKED
}

/// Runs `work` with CubeCL's primary context of the device of `x` current on this thread, as some
/// driver calls require.
///
/// # Errors
/// If the driver refuses.
pub(crate) fn in_context<R: CubeRuntime, T>(
    x: &CubeTensor<R>,
    work: impl FnOnce() -> T,
) -> Result<T, cudarc::driver::DriverError> {
    let device: &dyn Any = &x.device;
    let Some(CudaDevice { index }) = device.downcast_ref::<CudaDevice>() else {
        unreachable!("only CUDA devices have contexts");
    };
    in_context_of(*index, work)
}

/// The same for the device of a number.
///
/// # Errors
/// As above.
pub(crate) fn in_context_of<T>(index: usize, work: impl FnOnce() -> T) -> Result<T, cudarc::driver::DriverError> {
    let device = driver::device::get(index as i32)?;
    let before = driver::ctx::get_current()?.unwrap_or(std::ptr::null_mut());
    // SAFETY: the device was just given out by the driver, and its context is kept until `Retained`
    // is dropped.
    let context = unsafe { driver::primary_ctx::retain(device) }?;
    let _retained = Retained { device, before };
    // SAFETY: as above.
    unsafe { driver::ctx::set_current(context) }?;
    Ok(work())
}

/// A retained primary context; dropping it restores the previous one.
struct Retained {
    device: cudarc::driver::sys::CUdevice,
    before: cudarc::driver::sys::CUcontext,
}

impl Drop for Retained {
    fn drop(&mut self) {
        // SAFETY: the context before is somebody else's to keep, as it was; the device's was
        // retained once for this.
        unsafe {
            let _ = driver::ctx::set_current(self.before);
            let _ = driver::primary_ctx::release(self.device);
        }
    }
}

/// A tensor map for kernels: a contiguous bf16 matrix `[rows, columns]` at an address, as groups of
/// 64 columns, `[columns / 64, rows, 64]`, accessed in boxes of `[groups, rows, 64]` with the
/// 128-byte swizzle. It is created [in the device's context](in_context).
///
/// # Errors
/// If the driver refuses.
pub(crate) fn grouped_map(
    address: u64,
    [rows, columns]: [usize; 2],
    [groups, box_rows]: [usize; 2],
) -> Result<[u64; 16], String> {
    let strides = [columns as u64 * 2, 128];
    tensor_map(address, [64, rows as u64, columns as u64 / 64], &strides, [64, box_rows as u32, groups as u32])
}

/// The same for a matrix with rows in blocks of 16, `[rows / 16, columns / 64, 16, 64]`, accessed
/// in boxes of whole blocks, which are consecutive in shared memory.
///
/// # Errors
/// If the driver refuses.
pub(crate) fn blocks_map(address: u64, [rows, columns]: [usize; 2], blocks: usize) -> Result<[u64; 16], String> {
    let row = columns as u64 * 2;
    let [groups, all] = [columns as u64 / 64, rows as u64 / 16];
    tensor_map(address, [64, 16, groups, all], &[row, 128, 16 * row], [64, 16, groups as u32, blocks as u32])
}

/// A tensor map of bf16 with the 128-byte swizzle: sizes, strides in bytes (the first is two) and
/// box sizes, innermost dimension first.
fn tensor_map<const N: usize>(
    address: u64,
    shape: [u64; N],
    strides: &[u64],
    tile: [u32; N],
) -> Result<[u64; 16], String> {
    use cudarc::driver::sys::*;
    assert!(strides.len() + 1 == N, "a distance for each dimension but the first");
    let mut map = CUtensorMap { opaque: [0; 16] };
    // SAFETY: the driver reads N sizes, one stride less and twice N more numbers, and writes one
    // map. It does not read what is at the address.
    let result = unsafe {
        cuTensorMapEncodeTiled(
            &mut map,
            CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            N as u32,
            address as *mut std::ffi::c_void,
            shape.as_ptr(),
            strides.as_ptr(),
            tile.as_ptr(),
            [1u32; N].as_ptr(),
            CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
            CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
            CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    };
    if result == CUresult::CUDA_SUCCESS { Ok(map.opaque) } else { Err(format!("{result:?}")) }
}

/// Launches `blocks` blocks of a kernel on the CUDA device of `x`.
///
/// # Safety
/// The kernel must access memory only within its arguments.
pub(crate) unsafe fn launch<R: CubeRuntime, K: CudaKernel>(
    x: &CubeTensor<R>,
    kernel: K,
    blocks: u32,
    arguments: Arguments,
) {
    if rehearsal::is_on() {
        if tried(x, &kernel).is_none() {
            ahead::send(&kernel);
        }
        return;
    }
    let client: &dyn Any = &x.client;
    let Some(client) = client.downcast_ref::<ComputeClient<CudaRuntime>>() else {
        unreachable!("only CUDA devices have such kernels");
    };
    let Arguments { maps, pointers, words } = arguments;
    let length = words.len();
    let arguments = KernelArguments::new()
        .with_tensor_maps(maps)
        .with_buffers(pointers)
        .with_info(MetadataBindingInfo::new(words, length));
    client.launch(Box::new(Task(kernel)), CubeCount::Static(blocks, 1, 1), arguments);
}

/// [`compile_ahead`](crate::compile_ahead()) for a device; does nothing if it has no CUDA C++
/// kernels.
pub(crate) fn compile_ahead(device: &dyn Any, work: impl FnOnce()) {
    if let Some(device) = device.downcast_ref::<CudaDevice>()
        && let Some(features) = arch::of_device(device.index).filter(|features| features.arch().is_some())
    {
        ahead::compile_ahead(device.index, &features.target(), work);
    }
}

/// Whether a kernel runs on the device of `x`, if it was tried.
fn tried<R: CubeRuntime, K: CudaKernel>(x: &CubeTensor<R>, kernel: &K) -> Option<bool> {
    let tried = K::tried().lock().unwrap_or_else(PoisonError::into_inner);
    tried.as_ref()?.get(&(x.device.to_id(), kernel.clone())).copied()
}

/// Whether a kernel compiles and runs on the device of `x`; in a rehearsal, whether it is not known
/// to fail. `probe` launches it once, at the first call. If it fails, a warning gives the reason,
/// and what runs `instead`.
///
/// # Panics
/// If the device failed before.
pub(crate) fn works<R: CubeRuntime, K: CudaKernel>(
    x: &CubeTensor<R>,
    kernel: &K,
    instead: &str,
    probe: impl FnOnce(),
) -> bool {
    works_without(x, kernel, instead, probe, || None)
}

/// [`works`], with a check for a `fault` after the kernel ran.
///
/// # Panics
/// As [`works`] does.
pub(crate) fn works_without<R: CubeRuntime, K: CudaKernel>(
    x: &CubeTensor<R>,
    kernel: &K,
    instead: &str,
    probe: impl FnOnce(),
    fault: impl FnOnce() -> Option<String>,
) -> bool {
    if rehearsal::is_on() {
        return tried(x, kernel).unwrap_or(true);
    }
    let mut tried = K::tried().lock().unwrap_or_else(PoisonError::into_inner);
    let key = (x.device.to_id(), kernel.clone());
    *tried.get_or_insert_default().entry(key).or_insert_with(|| {
        let wait = || cubecl::future::block_on(x.client.sync());
        // An earlier error is not this kernel's, and must not be lost.
        if let Err(error) = wait() {
            panic!("the device failed before {kernel:?} was tried: {error}");
        }
        probe();
        let error = match wait() {
            Err(error) => error.to_string(),
            Ok(()) => match fault() {
                Some(fault) => fault,
                None => return true,
            },
        };
        // NVRTC's message, without the source after it.
        let reason = error.lines().find(|line| line.contains("error:")).or_else(|| error.lines().next());
        let mut driver = 0;
        // SAFETY: the driver writes one number.
        let _ = unsafe { cudarc::driver::sys::cuDriverGetVersion(&mut driver) };
        let driver = format!("{}.{}", driver / 1000, driver % 1000 / 10);
        let reason = reason.unwrap_or_default().trim();
        let text = format!("{kernel:?} does not run here, with a driver for CUDA {driver}: {reason}; {instead}");
        notice(Level::Warning, &text);
        false
    })
}

/// The number of a float dtype in `numbers.cuh`.
pub(crate) fn dtype_number(dtype: DType) -> usize {
    match dtype {
        DType::BF16 => 1,
        DType::F16 => 2,
        _ => 0,
    }
}

/// The name of a 16-bit dtype in kernel sources.
pub(crate) fn half_name(dtype: StorageType) -> Option<&'static str> {
    match dtype.elem_type() {
        ElemType::Float(FloatKind::BF16) => Some("bf16"),
        ElemType::Float(FloatKind::F16) => Some("f16"),
        _ => None,
    }
}
