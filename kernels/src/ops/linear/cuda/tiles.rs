//! How the GEMM for Hopper cuts a product, computed from what tiles were measured to cost; nothing
//! is tuned at run time.

/// How the GEMM for Hopper cuts a product into tiles of 256 rows, each computed by a cluster of two
/// blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tiles {
    /// Columns of a tile.
    pub(super) columns: usize,
    /// Whole tiles of each cluster, one after the other; those left are cut along K, in equal
    /// parts.
    pub(super) whole_rounds: usize,
}

/// Columns of the widest tile for Hopper.
pub(super) const WIDEST: usize = 256;

/// What tiles cost a cluster on an H100, in microseconds: a stage of 64 of K, the end of a tile,
/// the parts of tiles that are cut, and each further part of a tile; and, with one column of tiles,
/// by what share a stage takes longer whose rows are added up, too (four weights' gradients of
/// GPT-2 on an H200). The others are fitted to 33 products; from ends and cuts is taken what was
/// measured to be saved on an H200 when their stores lost their branches.
struct TileCosts {
    columns: usize,
    stage: f64,
    end: f64,
    cut: f64,
    part: f64,
    summing: f64,
}

const TILE_COSTS: [TileCosts; 3] = [
    TileCosts { columns: 128, stage: 0.456, end: 0.2, cut: 3.5, part: 2.6, summing: 0.9 },
    TileCosts { columns: 192, stage: 0.588, end: 0.95, cut: 7.0, part: 4.2, summing: 0.4 },
    TileCosts { columns: WIDEST, stage: 0.79, end: 1.1, cut: 13.0, part: 3.6, summing: 0.08 },
];

/// The tiles of a product on Hopper that take the least time: on the one hand wide ones, which read
/// less, on the other such that no cluster waits long for others. With `row_sums` each column of
/// tiles adds up rows of its share of the stages. None where no number of columns is `allowed`.
pub(super) fn tiles(
    [m, n, k]: [usize; 3],
    clusters: usize,
    row_sums: bool,
    allowed: impl Fn(usize) -> bool,
) -> Option<Tiles> {
    let stages = k.div_ceil(64) as f64;
    let mut best: Option<(f64, Tiles)> = None;
    for TileCosts { columns, stage, end, cut, part, summing } in
        TILE_COSTS.into_iter().filter(|costs| allowed(costs.columns))
    {
        let tiles = m.div_ceil(256) * n.div_ceil(columns);
        let stage = if row_sums { stage * (1.0 + summing / n.div_ceil(columns) as f64) } else { stage };
        let full = tiles / clusters;
        // All whole, with a last round that is not full; or the last one or two rounds cut.
        for whole_rounds in [tiles.div_ceil(clusters), full, full.saturating_sub(1)] {
            let cut_tiles = tiles.saturating_sub(whole_rounds * clusters) as f64;
            let mut time = whole_rounds as f64 * (stages * stage + end);
            if cut_tiles > 0.0 {
                let parts = clusters as f64 / cut_tiles;
                time += stages * stage / parts + end + cut + part * parts;
            }
            if best.is_none_or(|(least, _)| time < least) {
                best = Some((time, Tiles { columns, whole_rounds }));
            }
        }
    }
    best.map(|(_, tiles)| tiles)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Clusters of an H100 or H200.
    const CLUSTERS: usize = 66;

    #[test]
    fn every_tile_is_computed_and_few_clusters_wait() {
        for m in [128, 300, 2048, 16_384, 65_536] {
            for n in [128, 384, 776, 3072, 50_432] {
                for k in [64, 768, 8192, 16_384] {
                    let row_sums = k == 16_384;
                    let Some(Tiles { columns, whole_rounds }) = tiles([m, n, k], CLUSTERS, row_sums, |_| true) else {
                        panic!("all are allowed")
                    };
                    let all = m.div_ceil(256) * n.div_ceil(columns);
                    // What is not whole is cut, and there is no round of nothing.
                    assert!(
                        whole_rounds * CLUSTERS < all + CLUSTERS,
                        "{m}x{n}x{k}: {whole_rounds} rounds of {all} tiles"
                    );
                    let idle = (whole_rounds * CLUSTERS).saturating_sub(all);
                    assert!(idle == 0 || whole_rounds == all.div_ceil(CLUSTERS), "{m}x{n}x{k}");
                }
            }
        }
    }

    #[test]
    fn a_gradient_of_few_tiles_and_many_rows_is_cut() {
        assert_eq!(tiles([768, 768, 16_384], CLUSTERS, false, |_| true), Some(Tiles { columns: 128, whole_rounds: 0 }));
        // With the sums of rows wide tiles are the faster ones.
        let columns = |row_sums| tiles([3072, 768, 65_536], CLUSTERS, row_sums, |_| true).map(|tiles| tiles.columns);
        assert_eq!([columns(false), columns(true)], [Some(192), Some(WIDEST)]);
        // The product of as many numbers whose sums are short is not: 192 tiles of 256 columns are
        // three rounds of 66 clusters.
        assert_eq!(
            tiles([16_384, 768, 768], CLUSTERS, false, |_| true),
            Some(Tiles { columns: WIDEST, whole_rounds: 3 })
        );
    }
}
