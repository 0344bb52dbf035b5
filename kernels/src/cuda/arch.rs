//! NVIDIA GPU families with their own CUDA C++ kernels.
//!
//! A family's kernels are in `ops/<op>/cuda/<name>/`. A device uses those of the newest family
//! whose instructions it has; an operation that has none of that family runs its portable kernel.

use std::sync::{Once, OnceLock};

use burn::cubecl::cuda::CudaDevice;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cudarc::driver::{result as driver, sys::CUdevice_attribute};

use crate::notices::{Level, notice};

/// Makes a newer device use the kernels of an older family, with no more shared memory than a
/// device of that name has: to test them without such a device. Other features of the device, such
/// as TMA in CubeCL's kernels, stay in use.
pub(crate) const VARIABLE: &str = "FIRECLAY_CUDA_ARCH";

/// A GPU family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Arch {
    /// Compute capability 8.0 and later: A100, RTX 3090, L4, RTX 4090, RTX 5090. `mma`, `cp.async`.
    Sm80,
    /// Compute capability 9.0: H100, H200, GH200. TMA, wgmma, clusters.
    Sm90,
}

const ALL: [Arch; 2] = [Arch::Sm80, Arch::Sm90];

impl Arch {
    /// Its name in folders.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Sm80 => "sm80",
            Self::Sm90 => "sm90",
        }
    }

    /// The targets of NVRTC and ptxas that its kernels are compiled for ahead of time to see that
    /// they fit: with the family's specific instructions if any.
    pub(crate) const fn targets(self) -> &'static [Target] {
        match self {
            Self::Sm80 => &TARGETS_80,
            Self::Sm90 => &[Target { name: "sm_90a", shared_bytes: 227 << 10 }],
        }
    }

    /// Whether a device of this compute capability has its instructions.
    fn runs_on(self, capability: (i32, i32)) -> bool {
        match self {
            Self::Sm80 => capability >= (8, 0),
            // Those of `sm_90a` are of no other device.
            Self::Sm90 => capability == (9, 0),
        }
    }

    fn of_capability(capability: (i32, i32)) -> Option<Self> {
        ALL.into_iter().rfind(|arch| arch.runs_on(capability))
    }
}

/// A target of the compilers, and the most shared memory of a block there, in bytes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    pub(crate) name: &'static str,
    pub(crate) shared_bytes: usize,
}

const TARGETS_80: [Target; 4] = [
    Target { name: "sm_80", shared_bytes: 163 << 10 },
    Target { name: "sm_86", shared_bytes: 99 << 10 },
    Target { name: "sm_89", shared_bytes: 99 << 10 },
    Target { name: "sm_120", shared_bytes: 99 << 10 },
];

/// A device that [`VARIABLE`] names.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    pub(crate) name: &'static str,
    arch: Arch,
    capability: (i32, i32),
    shared_bytes: usize,
}

const NAMES: [Asked; 3] = [
    Asked { name: "sm80", arch: Arch::Sm80, capability: (8, 0), shared_bytes: 163 << 10 },
    Asked { name: "sm86", arch: Arch::Sm80, capability: (8, 6), shared_bytes: 99 << 10 },
    Asked { name: "sm90", arch: Arch::Sm90, capability: (9, 0), shared_bytes: 227 << 10 },
];

/// The device named by [`VARIABLE`].
///
/// # Errors
/// If it is unknown.
pub(crate) fn asked() -> Result<Option<Asked>, String> {
    let Some(name) = std::env::var_os(VARIABLE) else { return Ok(None) };
    let known = NAMES.into_iter().find(|asked| name.to_str() == Some(asked.name));
    known.map(Some).ok_or_else(|| {
        let names = NAMES.map(|asked| asked.name).join(", ");
        format!("{VARIABLE} is one of {names}, and not {}", name.display())
    })
}

/// The family that a device of this compute capability uses, and the name that [`VARIABLE`] asked
/// for.
///
/// # Errors
/// If that is unknown or newer than the device.
pub(crate) fn used_by((major, minor): (i32, i32)) -> Result<(Option<Arch>, Option<&'static str>), String> {
    match asked()? {
        Some(asked) if !asked.arch.runs_on((major, minor)) || asked.capability > (major, minor) => Err(format!(
            "{VARIABLE} is {}, and the device has compute capability {major}.{minor}, which does not run its kernels",
            asked.name
        )),
        Some(asked) => Ok((Some(asked.arch), Some(asked.name))),
        None => Ok((Arch::of_capability((major, minor)), None)),
    }
}

/// The requested device, once it is known to be valid: [`used_by`] refuses others before a device
/// is created.
fn asked_for() -> Option<Asked> {
    static ASKED: OnceLock<Option<Asked>> = OnceLock::new();
    *ASKED.get_or_init(|| asked().unwrap_or_default())
}

/// Whether [`VARIABLE`] names a family: kernels that no device of their family has been compared
/// with the reference on run only then.
pub(crate) fn is_forced() -> bool {
    asked_for().is_some()
}

/// What a device can do, with what [`VARIABLE`] takes from it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Features {
    capability: (i32, i32),
    /// Maximum shared memory of a block, in bytes.
    shared_bytes: usize,
    arch: Option<Arch>,
}

impl Features {
    fn of(index: i32) -> Self {
        let capability = capability(index).unwrap_or((0, 0));
        let own = Arch::of_capability(capability);
        let shared_bytes = shared_bytes_of(index).unwrap_or(48 << 10);
        // A device never uses a newer family's kernels.
        match asked_for().filter(|asked| asked.arch.runs_on(capability)) {
            Some(asked) => {
                Self { capability, shared_bytes: shared_bytes.min(asked.shared_bytes), arch: Some(asked.arch) }
            }
            None => Self { capability, shared_bytes, arch: own },
        }
    }

    /// The target that CubeCL compiles kernels for.
    pub(super) fn target(&self) -> String {
        let (major, minor) = self.capability;
        let specific = if self.capability >= (9, 0) { "a" } else { "" };
        format!("sm_{major}{minor}{specific}")
    }

    pub(super) fn arch(&self) -> Option<Arch> {
        self.arch
    }
}

/// What the device of this index can do.
pub(super) fn of_device(index: usize) -> Option<Features> {
    static FEATURES: OnceLock<Vec<Features>> = OnceLock::new();
    let features = FEATURES.get_or_init(|| {
        // Already set.
        let _ = driver::init();
        let count = driver::device::get_count().unwrap_or(0);
        (0..count).map(Features::of).collect()
    });
    let features = features.get(index).copied()?;
    if features.arch.is_none() {
        static TOLD: Once = Once::new();
        TOLD.call_once(|| {
            let (major, minor) = features.capability;
            let text = format!(
                "this device has compute capability {major}.{minor}; the kernels in CUDA C++ want 8.0 or later, and \
                 the portable ones run"
            );
            notice(Level::Note, &text);
        });
    }
    Some(features)
}

fn features<R: CubeRuntime>(x: &CubeTensor<R>) -> Option<Features> {
    let device: &dyn std::any::Any = &x.device;
    device.downcast_ref::<CudaDevice>().and_then(|device| of_device(device.index))
}

/// Whether the device of `x` uses the kernels of `arch`.
pub(crate) fn takes<R: CubeRuntime>(x: &CubeTensor<R>, arch: Arch) -> bool {
    family(x) == Some(arch)
}

/// The family whose kernels the device of `x` uses.
pub(crate) fn family<R: CubeRuntime>(x: &CubeTensor<R>) -> Option<Arch> {
    features(x).and_then(|features| features.arch)
}

/// Maximum shared memory of a block on the device of `x`, in bytes.
pub(crate) fn shared_bytes<R: CubeRuntime>(x: &CubeTensor<R>) -> usize {
    features(x).map_or(0, |features| features.shared_bytes)
}

/// Whether the tensor cores of the device of `x` multiply TF32 much faster than its f32 units
/// multiply f32: A100, H100 and B200 and their like.
pub(crate) fn has_fast_tf32<R: CubeRuntime>(x: &CubeTensor<R>) -> bool {
    features(x).is_some_and(|features| matches!(features.capability, (8, 0) | (9..=10, _)))
}

fn attribute(index: i32, attribute: CUdevice_attribute) -> Result<i32, cudarc::driver::DriverError> {
    let device = driver::device::get(index)?;
    // SAFETY: `device` was just given out by the driver, and the attribute is its own.
    unsafe { driver::device::get_attribute(device, attribute) }
}

fn capability(index: i32) -> Result<(i32, i32), cudarc::driver::DriverError> {
    Ok((
        attribute(index, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(index, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    ))
}

fn shared_bytes_of(index: i32) -> Result<usize, cudarc::driver::DriverError> {
    let most = attribute(index, CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
    Ok(usize::try_from(most).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_uses_the_newest_family_whose_instructions_it_has() {
        let of = Arch::of_capability;
        assert_eq!(
            [of((7, 5)), of((8, 0)), of((8, 6)), of((8, 9))],
            [None, Some(Arch::Sm80), Some(Arch::Sm80), Some(Arch::Sm80)]
        );
        // Nothing newer has what is specific to Hopper.
        assert_eq!(
            [of((9, 0)), of((10, 0)), of((12, 0)), of((17, 0))],
            [Some(Arch::Sm90), Some(Arch::Sm80), Some(Arch::Sm80), Some(Arch::Sm80)]
        );
    }
}
