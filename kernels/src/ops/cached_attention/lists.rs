//! Index lists for kernels over all rows of a pass, besides its positions and pages.

#[cfg(feature = "cuda")]
use std::cmp::Reverse;
use std::sync::OnceLock;

use burn::tensor::backend::Backend;
use burn::tensor::{Int, Tensor, TensorData};

#[cfg(feature = "cuda")]
use super::TILE;
use super::{CachedRow, CachedTokens};

/// Device lists, each computed on first use and shared by all layers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lists<B: Backend> {
    rows: OnceLock<Tensor<B, 1, Int>>,
    #[cfg(feature = "cuda")]
    tiles: OnceLock<Tensor<B, 1, Int>>,
}

impl<B: Backend> CachedTokens<B> {
    /// The row of each new token, `[tokens]`.
    pub(crate) fn row_of_each(&self) -> &Tensor<B, 1, Int> {
        self.lists.rows.get_or_init(|| {
            let rows = self.rows.iter().enumerate();
            self.list(rows.flat_map(|(row, CachedRow { tokens, .. })| std::iter::repeat_n(row, *tokens)).collect())
        })
    }

    /// Tiles of up to [`TILE`] new tokens of rows that have several: four numbers each, see
    /// [`tiles`].
    #[cfg(feature = "cuda")]
    pub(crate) fn tiles(&self) -> &Tensor<B, 1, Int> {
        self.lists.tiles.get_or_init(|| self.list(tiles(&self.rows, self.window).concat()))
    }

    fn list(&self, numbers: Vec<usize>) -> Tensor<B, 1, Int> {
        let numbers: Vec<i32> = numbers.into_iter().map(|number| number as i32).collect();
        let count = numbers.len();
        Tensor::from_data(TensorData::new(numbers, [count]), &self.positions.device())
    }
}

/// For each tile: its first token among all new ones, its number of tokens, the first token's index
/// in its row, and the row. Tiles with most keys come first.
#[cfg(feature = "cuda")]
fn tiles(rows: &[CachedRow], window: Option<usize>) -> Vec<[usize; 4]> {
    let mut tiles = Vec::new();
    let mut before = 0;
    for (at, row) in rows.iter().enumerate() {
        if row.tokens > 1 {
            tiles.extend((0..row.tokens).step_by(TILE).map(|first| {
                let tokens = TILE.min(row.tokens - first);
                [before + first, tokens, row.keys - row.tokens + first, at]
            }));
        }
        before += row.tokens;
    }
    let seen = |own: usize, tokens: usize| own + tokens - window.map_or(0, |window| (own + 1).saturating_sub(window));
    tiles.sort_by_key(|[_, tokens, own, _]| Reverse(seen(*own, *tokens)));
    tiles
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;

    #[test]
    fn tiles_keep_to_their_rows_and_the_longest_come_first() {
        let row = |tokens, keys| CachedRow { pages: [0].into(), tokens, keys };
        let rows = [row(1, 900), row(130, 130), row(3, 400), row(128, 1000)];
        assert_eq!(tiles(&rows, None), [[134, 128, 872, 3], [131, 3, 397, 2], [129, 2, 128, 1], [1, 128, 0, 1]]);
        // With a window, a tile of few tokens sees few keys anywhere.
        assert_eq!(tiles(&rows, Some(50)), [[134, 128, 872, 3], [1, 128, 0, 1], [131, 3, 397, 2], [129, 2, 128, 1]]);
    }
}
