//! Visible keys of a query in kernels, and tiles with any visible key.

use cubecl::prelude::*;

use crate::cubecl::clamp_index;

/// The window of a mask without one: longer than any sequence, far from overflow.
pub(super) const NO_WINDOW: i32 = 1 << 30;

/// [`AttentionMask`](crate::AttentionMask) without its tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum MaskKind {
    None,
    Causal,
    Positions,
    Lengths,
    Documents,
    Ranges,
}

/// The values of an attention that may change per launch.
#[derive(CubeType, CubeLaunch, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) batch_size: u32,
    pub(super) n_heads: u32,
    pub(super) n_kv_heads: u32,
    pub(super) queries: u32,
    pub(super) keys: u32,
    pub(super) window: i32,
    pub(super) scale: f32,
    /// Cap of the scores; zero for none.
    pub(super) softcap: f32,
    /// Random bits below this mean dropped.
    pub(super) threshold: u32,
    /// Factor on kept probabilities.
    pub(super) kept: f32,
}

/// The last visible key of a query, which ends its window. `ints` are the mask's positions,
/// lengths, document starts or ranges.
#[cube]
pub(super) fn last_key<I: Int>(
    ints: &Array<I>,
    batch: u32,
    query: u32,
    sizes: &Sizes,
    #[comptime] mask: MaskKind,
) -> i32 {
    match mask {
        MaskKind::None => i32::cast_from(sizes.keys) - 1,
        MaskKind::Causal | MaskKind::Documents => i32::cast_from(query + sizes.keys) - i32::cast_from(sizes.queries),
        MaskKind::Positions => {
            i32::cast_from(clamp_index::<I>(ints[(batch * sizes.queries + query) as usize], sizes.keys - 1))
        }
        MaskKind::Lengths => length::<I>(ints, batch, sizes) - 1,
        MaskKind::Ranges => {
            i32::cast_from(bound::<I>(ints[((batch * sizes.queries + query) * 2 + 1) as usize], sizes.keys - 1))
        }
    }
}

/// The first visible key of a query; negative if its window starts before all keys.
#[cube]
pub(super) fn first_seen<I: Int>(
    ints: &Array<I>,
    batch: u32,
    query: u32,
    sizes: &Sizes,
    #[comptime] mask: MaskKind,
) -> i32 {
    let of_window = last_key::<I>(ints, batch, query, sizes, mask) - sizes.window + 1;
    match mask {
        MaskKind::Documents => {
            let start = clamp_index::<I>(ints[(batch * sizes.queries + query) as usize], query);
            max(of_window, i32::cast_from(start))
        }
        MaskKind::Ranges => {
            let last = bound::<I>(ints[((batch * sizes.queries + query) * 2 + 1) as usize], sizes.keys - 1);
            i32::cast_from(bound::<I>(ints[((batch * sizes.queries + query) * 2) as usize], last))
        }
        MaskKind::None | MaskKind::Causal | MaskKind::Positions | MaskKind::Lengths => of_window,
    }
}

/// An end of a range, clamped to `0..=last`.
#[cube]
fn bound<I: Int>(end: I, last: u32) -> u32 {
    select(end < I::from_int(0), 0u32, clamp_index::<I>(end, last))
}

/// Keys of a padded row: at least one, and at most all.
#[cube]
fn length<I: Int>(ints: &Array<I>, batch: u32, sizes: &Sizes) -> i32 {
    let length = ints[batch as usize];
    let some = i32::cast_from(clamp_index::<I>(length, sizes.keys));
    select(length < I::from_int(1), 1i32, some)
}

/// Whether a query with visible keys `first` to `last` sees `key`.
#[cube]
pub(super) fn sees(key: u32, first: i32, last: i32) -> bool {
    let key = i32::cast_from(key);
    key <= last && key >= first
}

/// Whether every query of `first_query .. first_query + queries` sees every key of `first_key ..
/// first_key + keys`, all of which exist. Returns false if this would be expensive to compute.
#[cube]
pub(super) fn all_seen<I: Int>(
    ints: &Array<I>,
    batch: u32,
    first_query: u32,
    #[comptime] queries: u32,
    first_key: u32,
    #[comptime] keys: u32,
    sizes: &Sizes,
    #[comptime] mask: MaskKind,
) -> bool {
    if mask == MaskKind::Positions || mask == MaskKind::Documents || mask == MaskKind::Ranges {
        false.runtime()
    } else {
        let there = first_query + queries <= sizes.queries && first_key + keys <= sizes.keys;
        let low = last_key::<I>(ints, batch, first_query, sizes, mask);
        let high = last_key::<I>(ints, batch, first_query + (queries - 1), sizes, mask);
        there && i32::cast_from(first_key + (keys - 1)) <= low && i32::cast_from(first_key) > high - sizes.window
    }
}

/// The range of keys that any of the queries `first .. first + count` needs. A query without
/// visible keys needs all keys, since its probabilities are then uniform.
#[cube]
pub(super) fn keys_of<I: Int>(
    ints: &Array<I>,
    batch: u32,
    first: u32,
    sizes: &Sizes,
    #[comptime] count: u32,
    #[comptime] mask: MaskKind,
) -> (u32, u32) {
    let keys = i32::cast_from(sizes.keys);
    let after = min(first + count, sizes.queries);
    let mut start = keys;
    let mut end = 0i32;
    if mask == MaskKind::Documents {
        for query in first..after {
            start = min(start, max(first_seen::<I>(ints, batch, query, sizes, mask), 0i32));
        }
        end = last_key::<I>(ints, batch, after - 1, sizes, mask) + 1;
    } else if mask == MaskKind::Ranges {
        for query in first..after {
            start = min(start, first_seen::<I>(ints, batch, query, sizes, mask));
            end = max(end, last_key::<I>(ints, batch, query, sizes, mask) + 1);
        }
    } else if mask == MaskKind::Positions {
        for query in first..after {
            let last = last_key::<I>(ints, batch, query, sizes, mask);
            let (row_start, row_end) = needed(last, last, sizes);
            start = min(start, row_start);
            end = max(end, row_end);
        }
    } else {
        // The last key grows with the query: if both ends of the tile see a key, so do all queries
        // in between.
        let low = last_key::<I>(ints, batch, first, sizes, mask);
        let high = last_key::<I>(ints, batch, after - 1, sizes, mask);
        let (tile_start, tile_end) = needed(low, high, sizes);
        start = tile_start;
        end = tile_end;
    }
    (u32::cast_from(start), u32::cast_from(end))
}

/// The keys needed by queries whose last keys are in `low ..= high`.
#[cube]
fn needed(low: i32, high: i32, sizes: &Sizes) -> (i32, i32) {
    let keys = i32::cast_from(sizes.keys);
    let start = max(low - sizes.window + 1, 0i32);
    let blind = low < 0 || sizes.window <= 0 || high - sizes.window >= keys - 1;
    (select(blind, 0i32, start), select(blind, keys, min(high + 1, keys)))
}

/// The range of queries that need any of the keys `first .. first + count`.
#[cube]
pub(super) fn queries_of<I: Int>(
    ints: &Array<I>,
    batch: u32,
    first: u32,
    sizes: &Sizes,
    #[comptime] count: u32,
    #[comptime] mask: MaskKind,
) -> (u32, u32) {
    let keys = i32::cast_from(sizes.keys);
    let queries = i32::cast_from(sizes.queries);
    let start = i32::cast_from(first);
    let after = i32::cast_from(min(first + count, sizes.keys));
    match mask {
        MaskKind::Causal => {
            let ahead = keys - queries;
            // Some query may see no key at all.
            let blind = ahead < 0 || sizes.window <= 0;
            let low = select(blind, 0i32, max(start - ahead, 0i32));
            let high = select(blind, queries, min(after - 1 + sizes.window - ahead, queries));
            (u32::cast_from(low), u32::cast_from(max(low, high)))
        }
        // A query sees its own key and earlier ones.
        MaskKind::Documents => (first, sizes.queries),
        MaskKind::Lengths => {
            let length = length::<I>(ints, batch, sizes);
            let hidden = length > 0 && start >= length;
            (0u32.runtime(), select(hidden, 0u32, sizes.queries))
        }
        MaskKind::None | MaskKind::Positions | MaskKind::Ranges => (0u32.runtime(), sizes.queries),
    }
}
