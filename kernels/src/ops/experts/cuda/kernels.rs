//! The kernels of grouped products, and how wide their tiles are.

use std::sync::Mutex;

use super::{BLOCKS, DEPTH, TILE_ROWS};
use crate::cuda::{self, CudaKernel, GEMM, HOPPER, HOPPER_SHARED_BYTES, Tried};
use crate::ops::activation::ActivationKind;

/// Of 16 rows and 64 columns, one for each of eight warps; and barriers.
const OTHER_BYTES: usize = 8 * 16 * 128 + 256;
const GROUPED: &str = include_str!("sm90/grouped.cuh");

/// Widths of tiles, and the relative time of a stage: between what the dense GEMM was measured to
/// take, and these kernels when threads still copied rows (narrow tiles took 9 and 28% more).
const WIDTHS: [(usize, f64); 3] = [(128, 0.48), (192, 0.62), (256, 0.79)];

fn stage_bytes(columns: usize) -> usize {
    (TILE_ROWS / BLOCKS as usize + columns) * 2 * DEPTH
}

fn stages(columns: usize) -> usize {
    (HOPPER_SHARED_BYTES - OTHER_BYTES) / stage_bytes(columns)
}

fn shared_bytes(columns: usize) -> usize {
    OTHER_BYTES + stages(columns) * stage_bytes(columns)
}

fn source(half: &str, defined: String, source: &str) -> String {
    format!("#define HALF \"{half}\"\n#define TF32 0\n{defined}{HOPPER}{GEMM}{GROUPED}{source}")
}

/// Rows times the matrices of their experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct GroupedProduct {
    pub(super) half: &'static str,
    /// Columns of a tile.
    pub(super) columns: usize,
    /// Whether matrices have K rows.
    pub(super) b_major_n: bool,
    /// The nonlinearity, 0 for none.
    pub(super) activation: usize,
    pub(super) gated: bool,
    pub(super) saves: bool,
    pub(super) biased: bool,
    pub(super) weighted: bool,
}

impl CudaKernel for GroupedProduct {
    fn threads(&self) -> u32 {
        384
    }

    fn entry(&self) -> &'static str {
        "grouped_product_hopper"
    }

    fn source(&self) -> String {
        let Self { half, columns, b_major_n, activation, gated, saves, biased, weighted } = *self;
        let defined = cuda::defines([
            ("COLUMNS", columns),
            ("STAGES", stages(columns)),
            ("A_MAJOR_M", 0),
            ("B_MAJOR_N", b_major_n.into()),
            ("ACTIVATION", activation),
            ("GATED", gated.into()),
            ("SAVES", saves.into()),
            ("BIASED", biased.into()),
            ("WEIGHTED", weighted.into()),
        ]);
        source(half, defined, include_str!("sm90/product.cu"))
    }

    fn shared_bytes(&self) -> usize {
        shared_bytes(self.columns)
    }

    fn tried() -> &'static Tried<Self> {
        static TRIED: Tried<GroupedProduct> = Mutex::new(None);
        &TRIED
    }
}

/// The gradient of experts' matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct GroupedOuter {
    pub(super) half: &'static str,
    /// Columns of a tile.
    pub(super) columns: usize,
    pub(super) adds: bool,
}

impl CudaKernel for GroupedOuter {
    fn threads(&self) -> u32 {
        384
    }

    fn entry(&self) -> &'static str {
        "grouped_outer_hopper"
    }

    fn source(&self) -> String {
        let Self { half, columns, adds } = *self;
        let defined = cuda::defines([
            ("COLUMNS", columns),
            ("STAGES", stages(columns)),
            ("A_MAJOR_M", 1),
            ("B_MAJOR_N", 1),
            ("GATED", 0),
            ("ADDS", adds.into()),
        ]);
        source(half, defined, include_str!("sm90/outer.cu"))
    }

    fn shared_bytes(&self) -> usize {
        shared_bytes(self.columns)
    }

    fn tried() -> &'static Tried<Self> {
        static TRIED: Tried<GroupedOuter> = Mutex::new(None);
        &TRIED
    }
}

/// An activation's number in the source, if it has one.
pub(super) fn number(kind: ActivationKind) -> Option<usize> {
    match kind {
        ActivationKind::GeluTanh => Some(1),
        ActivationKind::Relu => Some(2),
        ActivationKind::Silu => Some(3),
        ActivationKind::QuickGelu => Some(4),
        ActivationKind::GeluErf | ActivationKind::ReluSquared => None,
    }
}

/// The width of tiles with which so many rows of tiles of `[n, k]` take the least time.
pub(super) fn product_columns([rows, n, k]: [usize; 3], clusters: usize, gated: bool) -> usize {
    // Gates are written in blocks of 64 columns.
    let allowed = |columns: usize| !gated || columns.is_multiple_of(128);
    // The end of a tile takes about as long as two stages.
    let time = |columns: usize, stage: f64| {
        let rounds = (rows * n.div_ceil(columns)).div_ceil(clusters);
        rounds as f64 * (k.div_ceil(DEPTH) + 2) as f64 * stage
    };
    narrowest(WIDTHS.into_iter().filter(|(columns, _)| allowed(*columns)), time)
}

/// The same for gradients of `n_experts` matrices of `m` by `n`, whose rows of tokens are about as
/// many for each.
pub(super) fn outer_columns([m, n, n_experts]: [usize; 3], clusters: usize) -> usize {
    let time = |columns: usize, stage: f64| {
        (n_experts * m.div_ceil(TILE_ROWS) * n.div_ceil(columns)).div_ceil(clusters) as f64 * stage
    };
    narrowest(WIDTHS.into_iter(), time)
}

fn narrowest(widths: impl Iterator<Item = (usize, f64)>, time: impl Fn(usize, f64) -> f64) -> usize {
    let timed = widths.map(|(columns, stage)| (columns, time(columns, stage)));
    timed.min_by(|one, other| one.1.total_cmp(&other.1)).map_or(WIDTHS[0].0, |(columns, _)| columns)
}

/// The kernels of a mixture in bf16: their names and sources.
pub(crate) fn hopper_sources() -> impl Iterator<Item = (String, String)> {
    let plain = |columns| GroupedProduct {
        half: "bf16",
        columns,
        b_major_n: false,
        activation: 0,
        gated: false,
        saves: false,
        biased: false,
        weighted: true,
    };
    let widths = WIDTHS.map(|(columns, _)| columns);
    let products = widths.into_iter().flat_map(move |columns| {
        let plain = plain(columns);
        let activated = GroupedProduct { activation: 1, saves: true, biased: true, weighted: false, ..plain };
        let gated = GroupedProduct { activation: 3, gated: true, ..activated };
        let all = [
            plain,
            GroupedProduct { biased: true, ..plain },
            GroupedProduct { b_major_n: true, weighted: false, ..plain },
            activated,
            gated,
            GroupedProduct { saves: false, biased: false, ..gated },
            GroupedProduct { activation: 4, ..gated },
        ];
        all.into_iter().filter(move |kernel| !kernel.gated || columns.is_multiple_of(128))
    });
    let outer =
        widths.into_iter().flat_map(|columns| [false, true].map(|adds| GroupedOuter { half: "bf16", columns, adds }));
    products.map(cuda::named).chain(outer.map(cuda::named))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_are_wide_where_rows_are_many_and_waste_few_columns() {
        // 128 experts of 1,024 rows.
        assert_eq!(product_columns([576, 1536, 2048], 66, true), 256);
        // gpt-oss: 2,880 columns are 15 tiles of 192.
        assert_eq!(product_columns([576, 2880, 2880], 66, false), 192);
        // 16 experts, whose gradients are 18 wide tiles each: 4.4 rounds; 24 of 192 are 5.8.
        assert_eq!(outer_columns([768, 1536, 16], 66), 192);
    }

    #[test]
    fn all_stages_fit_into_shared_memory() {
        for (columns, _) in WIDTHS {
            assert!(stages(columns) >= 4 && shared_bytes(columns) <= HOPPER_SHARED_BYTES, "{columns}");
        }
    }
}
