//! Attention on any device: f32 products without tensor cores (SIMT), tile by tile in shared
//! memory.
//!
//! A cube has `side * side` units, each with a 4 x 4 block of a tile: of scores, of their
//! gradients, and of each slice of the accumulators. All three products of a tile have one of two
//! forms: [`dots`](tile::dots) of the rows of two slices, and [`accumulate`](tile::accumulate) of a
//! tile and a slice.
//!
//! ```text
//!              4 * side columns             a unit (x, y)
//!            +---+---+---+---+              +---------+
//!            |0,0|1,0|   |   |              | 4 rows  |
//! 4 * side   +---+---+---+---+              | by 4    |
//! rows       |0,1|   |   |   |              | columns |
//!            +---+---+---+---+              +---------+
//! ```

mod backward_kv;
mod backward_q;
mod forward;
mod row_statistics;
mod tile;

use burn_cubecl::CubeRuntime;
use cubecl::prelude::*;

use super::mask::MaskKind;

pub(super) use self::backward_kv::backward_kv;
pub(super) use self::backward_q::backward_q;
pub(super) use self::forward::forward;
pub(super) use self::row_statistics::row_statistics;

/// Four elements side by side.
type Quad = Vector<f32, Const<4>>;

/// Compile-time values of the kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Variant {
    /// A tile has four times as many rows and columns; a cube has the square as units.
    pub(super) side: usize,
    pub(super) head_dim: usize,
    pub(super) mask: MaskKind,
    pub(super) drops: bool,
}

impl Variant {
    /// Rows and columns of a tile.
    pub(super) const fn tile(&self) -> usize {
        4 * self.side
    }

    /// Number of slices of a head, each as wide as a tile.
    pub(super) const fn slices(&self) -> usize {
        self.head_dim.div_ceil(self.tile())
    }

    pub(super) fn units(&self) -> CubeDim {
        CubeDim::new_1d((self.side * self.side) as u32)
    }

    /// The largest tiles that fit the device and are filled by a head.
    pub(super) fn choose<R: CubeRuntime>(
        client: &ComputeClient<R>,
        head_dim: usize,
        mask: MaskKind,
        drops: bool,
    ) -> Self {
        let variant = |side| Self { side, head_dim, mask, drops };
        let hardware = &client.properties().hardware;
        let large = variant(16);
        let fits = large.shared_bytes() <= hardware.max_shared_memory_size;
        if fits && head_dim > 32 { large } else { variant(8) }
    }

    /// Shared memory of the largest kernel: a slice of rows and one of columns, a tile, and partial
    /// sums of rows.
    const fn shared_bytes(&self) -> usize {
        16 * (2 * self.tile() * (self.side + 1) + self.tile() * self.side + self.side * self.side)
    }
}
