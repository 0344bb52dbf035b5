//! Launches that cost the launching thread little: where tokens are decoded, and where small models are trained, that thread
//! is what bounds small batches.
//!
//! CubeCL's generated launches copy all that a device can do, write out the kernel's name, and hash all that it is
//! compiled for number by number, each time. Here a kernel is put together only if it has to be compiled.

use std::fmt::Debug;
use std::hash::{Hash, Hasher};

use burn_cubecl::CubeRuntime;
use cubecl::prelude::*;

/// A kernel `K` that is put together, of `what` it is compiled for, when it has to be compiled.
pub(crate) struct Deferred<R: CubeRuntime, W, K> {
    pub(crate) settings: KernelSettings,
    pub(crate) client: ComputeClient<R>,
    pub(crate) what: W,
    pub(crate) kernel: fn(KernelSettings, ComputeClient<R>, W) -> K,
}

/// What a kernel is compiled for.
pub(crate) trait What: Clone + Debug + Eq + Hash + Send + Sync + 'static {}

impl<W: Clone + Debug + Eq + Hash + Send + Sync + 'static> What for W {}

impl<R: CubeRuntime, W: What, K: CubeKernel> KernelMetadata for Deferred<R, W, K> {
    fn id(&self) -> KernelId {
        let id = KernelId::new::<Self>().address_type(self.settings.address_type);
        id.cube_dim(self.settings.cube_dim).info(self.what.clone())
    }

    fn address_type(&self) -> StorageType {
        self.settings.address_type.unsigned_type()
    }
}

impl<R: CubeRuntime, W: What, K: CubeKernel> CubeKernel for Deferred<R, W, K> {
    fn define(&self) -> KernelDefinition {
        (self.kernel)(self.settings.clone(), self.client.clone(), self.what.clone()).define()
    }
}

/// Collects what is to be hashed and hands it on in one run: CubeCL's hasher takes long for each number by itself.
pub(crate) struct Packed<'a, H: Hasher> {
    to: &'a mut H,
    bytes: [u8; 512],
    length: usize,
}

impl<'a, H: Hasher> Packed<'a, H> {
    pub(crate) fn new(to: &'a mut H) -> Self {
        Self { to, bytes: [0; 512], length: 0 }
    }
}

impl<H: Hasher> Hasher for Packed<'_, H> {
    fn write(&mut self, bytes: &[u8]) {
        for bytes in bytes.chunks(self.bytes.len()) {
            if self.length + bytes.len() > self.bytes.len() {
                self.hand_on();
            }
            self.bytes[self.length..self.length + bytes.len()].copy_from_slice(bytes);
            self.length += bytes.len();
        }
    }

    fn finish(&self) -> u64 {
        unreachable!("what is packed is hashed by another")
    }
}

impl<H: Hasher> Packed<'_, H> {
    /// Hands on what was collected.
    pub(crate) fn hand_on(&mut self) {
        self.to.write(&self.bytes[..self.length]);
        self.length = 0;
    }
}

/// Launches a kernel as its `launch_unchecked` does, and is as unsafe, but [`Deferred`]. It names the kernel's generic sizes
/// and types, its arguments, and its parameters of compilation, each in the kernel's order; these have to stand before
/// the parameters that define types.
macro_rules! launch {
    (
        $module:ident::$kernel:ident, $client:expr, $cubes:expr, $units:expr,
        [$($size:ident = $width:expr),* $(,)?], [$($float:ident = $dtype:expr),* $(,)?],
        [$($name:ident: $argument:ty = $value:expr),* $(,)?], [$($part:ident: $part_type:ty = $made_for:expr),* $(,)?]
    ) => {{
        #[allow(non_snake_case)]
        #[derive(Clone, Debug, PartialEq, Eq)]
        struct MadeFor {
            $($size: usize,)*
            $($float: StorageType,)*
            $($name: <$argument as LaunchArg>::CompilationArg,)*
            $($part: $part_type,)*
        }

        impl std::hash::Hash for MadeFor {
            fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
                let mut packed = $crate::cubecl::lazy_kernel::Packed::new(state);
                $(self.$size.hash(&mut packed);)*
                $(self.$float.hash(&mut packed);)*
                $(self.$name.hash(&mut packed);)*
                $(self.$part.hash(&mut packed);)*
                packed.hand_on();
            }
        }

        let client = $client;
        let settings = KernelSettings::default().cube_dim($units).address_type(AddressType::U32);
        let mut launcher = KernelLauncher::new(settings.clone());
        launcher.with_scope(|scope| {
            $(scope.register_size::<$module::$size>($width);)*
            $(scope.register_type::<$module::$float>($dtype.into());)*
        });
        let what = MadeFor {
            $($size: $width,)*
            $($float: $dtype.into(),)*
            $($name: <$argument as LaunchArg>::register($value, &mut launcher),)*
            $($part: $made_for,)*
        };
        let kernel = $crate::cubecl::lazy_kernel::Deferred {
            settings,
            client: client.clone(),
            what,
            kernel: |settings, client, what: MadeFor| {
                $module::$kernel::new(
                    settings,
                    client,
                    $(what.$name,)*
                    $(what.$size,)*
                    $(what.$part,)*
                    $(what.$float,)*
                )
            },
        };
        launcher.launch_unchecked($cubes, kernel, client)
    }};
}
pub(crate) use launch;
