//! Launches with little overhead on the launching thread, which limits decoding and the training of
//! small models.
//!
//! CubeCL's generated launches copy all device properties, format the kernel's name, and hash all
//! compile-time values one by one, each time. Here a kernel's definition is only built when it has
//! to be compiled.

use std::fmt::Debug;
use std::hash::{Hash, Hasher};

use burn_cubecl::CubeRuntime;
use cubecl::prelude::*;

/// A kernel `K` whose definition is built from `key` only for compilation.
pub(crate) struct LazyKernel<R: CubeRuntime, W, K> {
    pub(crate) settings: KernelSettings,
    pub(crate) client: ComputeClient<R>,
    pub(crate) key: W,
    pub(crate) kernel: fn(KernelSettings, ComputeClient<R>, W) -> K,
}

/// Compile-time values of a kernel.
pub(crate) trait CompileKey: Clone + Debug + Eq + Hash + Send + Sync + 'static {}

impl<W: Clone + Debug + Eq + Hash + Send + Sync + 'static> CompileKey for W {}

impl<R: CubeRuntime, W: CompileKey, K: CubeKernel> KernelMetadata for LazyKernel<R, W, K> {
    fn id(&self) -> KernelId {
        let id = KernelId::new::<Self>().address_type(self.settings.address_type);
        id.cube_dim(self.settings.cube_dim).info(self.key.clone())
    }

    fn address_type(&self) -> StorageType {
        self.settings.address_type.unsigned_type()
    }
}

impl<R: CubeRuntime, W: CompileKey, K: CubeKernel> CubeKernel for LazyKernel<R, W, K> {
    fn define(&self) -> KernelDefinition {
        (self.kernel)(self.settings.clone(), self.client.clone(), self.key.clone()).define()
    }
}

/// Buffers the hashed bytes and passes them on at once: CubeCL's hasher is slow per call.
pub(crate) struct BufferedHasher<'a, H: Hasher> {
    to: &'a mut H,
    bytes: [u8; 512],
    length: usize,
}

impl<'a, H: Hasher> BufferedHasher<'a, H> {
    pub(crate) fn new(to: &'a mut H) -> Self {
        Self { to, bytes: [0; 512], length: 0 }
    }
}

impl<H: Hasher> Hasher for BufferedHasher<'_, H> {
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
        unreachable!("what is buffered is hashed by another")
    }
}

impl<H: Hasher> BufferedHasher<'_, H> {
    /// Passes on the buffer.
    pub(crate) fn hand_on(&mut self) {
        self.to.write(&self.bytes[..self.length]);
        self.length = 0;
    }
}

/// Launches a kernel like its generated `launch_unchecked`, and is as unsafe, but through a
/// [`LazyKernel`]. It lists the kernel's generic sizes and types, its arguments, and its
/// compile-time parameters, each in the kernel's order; parameters that define types come last.
macro_rules! launch {
    (
        $module:ident::$kernel:ident, $client:expr, $cubes:expr, $units:expr,
        [$($size:ident = $width:expr),* $(,)?], [$($float:ident = $dtype:expr),* $(,)?],
        [$($name:ident: $argument:ty = $value:expr),* $(,)?], [$($part:ident: $part_type:ty = $part_value:expr),* $(,)?]
    ) => {{
        #[allow(non_snake_case)]
        #[derive(Clone, Debug, PartialEq, Eq)]
        struct Key {
            $($size: usize,)*
            $($float: StorageType,)*
            $($name: <$argument as LaunchArg>::CompilationArg,)*
            $($part: $part_type,)*
        }

        impl std::hash::Hash for Key {
            fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
                let mut buffered = $crate::cubecl::lazy_kernel::BufferedHasher::new(state);
                $(self.$size.hash(&mut buffered);)*
                $(self.$float.hash(&mut buffered);)*
                $(self.$name.hash(&mut buffered);)*
                $(self.$part.hash(&mut buffered);)*
                buffered.hand_on();
            }
        }

        let client = $client;
        let settings = KernelSettings::default().cube_dim($units).address_type(AddressType::U32);
        let mut launcher = KernelLauncher::new(settings.clone());
        launcher.with_scope(|scope| {
            $(scope.register_size::<$module::$size>($width);)*
            $(scope.register_type::<$module::$float>($dtype.into());)*
        });
        let key = Key {
            $($size: $width,)*
            $($float: $dtype.into(),)*
            $($name: <$argument as LaunchArg>::register($value, &mut launcher),)*
            $($part: $part_value,)*
        };
        let kernel = $crate::cubecl::lazy_kernel::LazyKernel {
            settings,
            client: client.clone(),
            key,
            kernel: |settings, client, key: Key| {
                $module::$kernel::new(
                    settings,
                    client,
                    $(key.$name,)*
                    $(key.$size,)*
                    $(key.$part,)*
                    $(key.$float,)*
                )
            },
        };
        launcher.launch_unchecked($cubes, kernel, client)
    }};
}
pub(crate) use launch;
