//! Attention on any device: products in f32 (SIMT, without tensor cores), tile by tile through shared memory.
//!
//! A cube is a square of `side * side` units, and each unit has a block of four by four of a tile: of the scores, of their
//! gradients, and of each slice of the accumulators. All three products of a tile have one of two shapes:
//! [`dots`](tile::dots), of the rows of two slices, and [`accumulate`](tile::accumulate), of a tile and a slice.
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

/// What the kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Variant {
    /// A tile has four times this many rows and columns, a cube the square of it of units.
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

    /// How many slices a head is cut into, each as wide as a tile.
    pub(super) const fn slices(&self) -> usize {
        self.head_dim.div_ceil(self.tile())
    }

    pub(super) fn units(&self) -> CubeDim {
        CubeDim::new_1d((self.side * self.side) as u32)
    }

    /// The largest tiles that the device has room for and a head fills.
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

    /// Shared memory of the largest kernel: a slice of rows and one of columns, a tile, and partial sums of rows.
    const fn shared_bytes(&self) -> usize {
        16 * (2 * self.tile() * (self.side + 1) + self.tile() * self.side + self.side * self.side)
    }
}
