//! Attention of new tokens over paged keys and values, for all rows in one launch.

use burn::tensor::DType;
use burn_cubecl::CubeRuntime;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::CubeElement;

use super::{AttentionHopper, KEPT, MOST_WINDOW, ROWS, map_heads};
use crate::cubecl::empty;
use crate::cuda::{self, Arch, Arguments};
use crate::multiprocessors::multiprocessors;
use crate::ops::attention::cubecl::Heads;
use crate::ops::attention::{AttentionOptions, MOST_TOKENS};
use crate::ops::cached_attention::TILE;

/// Tokens per page.
const PAGE: usize = 64;

const _: () = assert!(TILE == KEPT, "a block takes a tile");

/// A paged attention that the kernel supports.
#[derive(Clone, Copy)]
pub(crate) struct PagedHopper {
    kernel: AttentionHopper,
    window: usize,
    scale: f32,
}

impl PagedHopper {
    /// If the kernel supports the device, the dtype, and the sizes of queries `[tokens, n_heads,
    /// head_dim]` and of `cached` keys and values `[pages, n_kv_heads, page_tokens, head_dim]`, and
    /// runs. The longest row has `most_keys`. Scores are scaled by more than zero, and not capped.
    pub(crate) fn new<R: CubeRuntime>(
        query: &CubeTensor<R>,
        cached: [&CubeTensor<R>; 2],
        table: &CubeTensor<R>,
        most_keys: usize,
        (window, options): (Option<usize>, AttentionOptions),
    ) -> Option<Self> {
        let half = cuda::half_name(query.dtype.into())?;
        let head_dim = query.meta.shape()[2];
        let sizes = [64, 128].contains(&head_dim) && cached[0].meta.shape()[2] == PAGE && most_keys <= MOST_TOKENS;
        let reads = |x: &CubeTensor<R>| {
            let begins = x.handle.offset_start.unwrap_or(0).is_multiple_of(16);
            x.dtype == query.dtype && begins && x.is_contiguous()
        };
        let scale = options.scale as f32;
        let taken = sizes
            && scale.is_normal()
            && scale > 0.0
            && options.softcap.is_none()
            && [query, cached[0], cached[1]].into_iter().all(reads)
            && table.dtype == DType::I32
            && cuda::takes(query, Arch::Sm90);
        let paged = Self {
            kernel: AttentionHopper::paged(half, head_dim),
            window: window.unwrap_or(MOST_WINDOW).min(MOST_WINDOW),
            scale,
        };
        (taken && paged.works(query)).then_some(paged)
    }

    /// Whether the kernel runs on the device of `x`; tried on a tile of one head, in one page.
    fn works<R: CubeRuntime>(&self, x: &CubeTensor<R>) -> bool {
        cuda::works(x, &self.kernel, "rows of a cache are attended to one by one", || {
            let head_dim = self.kernel.head_dim;
            let [query, out] = [(); 2].map(|()| empty(x, [PAGE, 1, head_dim], x.dtype));
            let [keys, values] = [(); 2].map(|()| empty(x, [1, 1, PAGE, head_dim], x.dtype));
            let integers = |integers: &[i32]| {
                let handle = x.client.create_from_slice(i32::as_bytes(integers));
                CubeTensor::new_contiguous(
                    x.client.clone(),
                    x.device.clone(),
                    [1, integers.len()].into(),
                    handle,
                    DType::I32,
                )
            };
            // SAFETY: one row, whose tokens fill its one page.
            unsafe {
                self.forward(&query, [&keys, &values], &integers(&[0]), &integers(&[0, PAGE as i32, 0, 0]), &out);
            }
        })
    }

    /// Writes the tiles' rows of `out` `[tokens, n_heads, head_dim]`. `table` has the pages of each
    /// row, `[rows, pages_a_row]`.
    ///
    /// # Safety
    /// `tiles` has four numbers per tile: its first token, its number of tokens up to [`TILE`], the
    /// first token's index in its row, and the row. Tokens and rows must exist, and the table must
    /// have pages for all of their keys.
    pub(crate) unsafe fn forward<R: CubeRuntime>(
        &self,
        query: &CubeTensor<R>,
        cached: [&CubeTensor<R>; 2],
        table: &CubeTensor<R>,
        tiles: &CubeTensor<R>,
        out: &CubeTensor<R>,
    ) {
        let ([tokens, n_heads, head_dim], [pages, n_kv_heads, page_tokens, _]) = (shape(query), shape(cached[0]));
        let shapes = shape(out) == [tokens, n_heads, head_dim]
            && cached.iter().all(|held| shape(held) == [pages, n_kv_heads, PAGE, self.kernel.head_dim])
            && [head_dim, page_tokens] == [self.kernel.head_dim, PAGE]
            && n_heads.is_multiple_of(n_kv_heads);
        assert!(shapes, "cached_attention: queries, keys and values of one shape");
        let dtypes = [table, tiles].iter().all(|integers| integers.dtype == DType::I32 && integers.is_contiguous())
            && [cached[0], cached[1], out].iter().all(|x| x.dtype == query.dtype && x.is_contiguous());
        assert!(dtypes, "cached_attention: integers of 32 bits, and floats of one dtype");
        let count = tiles.meta.shape().num_elements() / 4;
        let [_, pages_a_row] = shape(table);
        let packed = |x: &CubeTensor<R>| Heads {
            tensor: x.clone(),
            offset: 0,
            strides: [tokens * n_heads * head_dim, head_dim, n_heads * head_dim],
        };
        let arguments = map_heads(Arguments::default(), &packed(query), [1, n_heads, tokens], head_dim, [KEPT, 64]);
        let arguments = cached.into_iter().fold(arguments, |arguments, held| {
            let held = Heads::from_tensor(held.clone());
            map_heads(arguments, &held, [pages, n_kv_heads, PAGE], head_dim, [PAGE, 64])
        });
        let arguments = map_heads(arguments, &packed(out), [1, n_heads, tokens], head_dim, [ROWS, 64]);
        let sizes = [count, n_heads, n_kv_heads, pages, pages_a_row, self.window, self.scale.to_bits() as usize];
        let arguments = sizes.into_iter().fold(arguments.pointer(tiles).pointer(table), Arguments::word);
        // SAFETY: TMA reads and writes within the tensors that its maps were made of, whatever the
        // table has; the table is read where it has the pages of a tile's row, and tiles that are
        // not full write the tokens that they have.
        unsafe { cuda::launch(query, self.kernel, multiprocessors(query), arguments) };
    }
}

fn shape<R: CubeRuntime, const D: usize>(x: &CubeTensor<R>) -> [usize; D] {
    x.meta.shape().dims()
}
