//! Attention on tensor cores: 16-bit products with f32 accumulation (Dao, 2023).
//!
//! A cube has four planes, each with whole rows of a tile. Scores, probabilities and accumulators
//! stay in registers, in the layout of `mma` ([`tensor_cores`](crate::cubecl::tensor_cores)), so
//! that a tile of probabilities is already the left operand of its product with the values.
//!
//! ```text
//! forward: one cube a tile of queries        backward_kv: one cube a tile of keys
//!
//!            keys -->  columns at a time                queries -->  columns at a time
//!          +-----------------------+                  +-----------------------+
//! plane 0  | 16 * bands rows of Q  |  S = Q K^T       | 16 rows of K and V    |  S^T = K Q^T
//! plane 1  |                       |  P = exp(S - m)  |                       |  dP^T = V dO^T
//! plane 2  |                       |  O += P V        |                       |  dV += P^T dO
//! plane 3  |                       |                  |                       |  dK += dS^T Q
//!          +-----------------------+                  +-----------------------+
//! backward_q has a tile of queries as the forward pass has: dQ += dS K.
//! ```

mod backward_kv;
mod backward_q;
mod forward;
mod tile;

use burn_cubecl::CubeRuntime;

use super::mask::MaskKind;
use super::{Heads, width};
use crate::cubecl::tensor_cores::has_tensor_cores;

pub(super) use self::backward_kv::backward_kv;
pub(super) use self::backward_q::backward_q;
pub(super) use self::forward::forward;

const PLANES: usize = 4;
const UNITS: usize = 32 * PLANES;

/// Compile-time values of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Variant {
    pub(super) head_dim: usize,
    /// Rows per plane, in units of 16.
    pub(super) bands: usize,
    /// Columns of a tile of scores.
    pub(super) columns: usize,
    /// Whether a plane keeps its operand rows in registers.
    pub(super) holds: bool,
    /// Whether the next tile is prefetched.
    pub(super) ahead: bool,
    /// Number of cubes that share the accumulators of a tile, each with an equal part of the head's
    /// columns.
    pub(super) slices: usize,
    pub(super) mask: MaskKind,
    pub(super) drops: bool,
}

impl Variant {
    pub(super) const fn forward(head_dim: usize, mask: MaskKind, drops: bool) -> Self {
        let bands = if head_dim <= 64 { 2 } else { 1 };
        let small = head_dim <= 128;
        let columns = if small { 64 } else { 32 };
        Self { head_dim, bands, columns, holds: small, ahead: small, slices: 1, mask, drops }
    }

    pub(super) const fn backward_q(head_dim: usize, mask: MaskKind, drops: bool) -> Self {
        let small = head_dim <= 64;
        let columns = if head_dim <= 128 { 64 } else { 32 };
        Self { head_dim, bands: 1, columns, holds: small, ahead: small, slices: 1, mask, drops }
    }

    pub(super) const fn backward_kv(head_dim: usize, mask: MaskKind, drops: bool) -> Self {
        let small = head_dim <= 64;
        let columns = if small { 64 } else { 32 };
        let slices = if head_dim <= 128 { 1 } else { 2 };
        Self { head_dim, bands: 1, columns, holds: small, ahead: small, slices, mask, drops }
    }

    /// Rows of a tile.
    pub(super) const fn rows(&self) -> usize {
        16 * self.bands * PLANES
    }

    /// Sixteen-byte vectors per row.
    pub(super) const fn wide(&self) -> usize {
        self.head_dim / 8
    }

    /// The same in shared memory: odd, so that neighbouring rows start in different banks.
    pub(super) const fn stride(&self) -> usize {
        self.wide() + 1
    }

    /// Blocks of 16 columns in a row.
    pub(super) const fn depth(&self) -> usize {
        self.head_dim / 16
    }

    /// Blocks of 16 columns in the accumulators of a cube.
    pub(super) const fn width(&self) -> usize {
        self.depth().div_ceil(self.slices)
    }

    /// Vectors of a tile of `rows` rows per unit.
    pub(super) const fn share(&self, rows: usize) -> usize {
        (rows * self.wide()).div_ceil(UNITS)
    }
}

/// Whether the tensor-core kernels support device, dtype, sizes and alignment.
pub(super) fn supported<R: CubeRuntime>(heads: &[&Heads<R>], head_dim: usize) -> bool {
    // Shared memory of the largest kernel: four tiles of 64 rows.
    let shared = 4 * 64 * 2 * (head_dim + 8);
    has_tensor_cores(&heads[0].tensor)
        && heads[0].tensor.client.properties().hardware.max_shared_memory_size >= shared
        && head_dim.is_multiple_of(16)
        && head_dim <= 256
        && width(heads, head_dim, 8) == 8
}
