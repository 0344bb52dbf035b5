//! Products with matrices in [tiles](crate::quant::tiles), with the best instructions of the
//! processor.
//!
//! ```text
//! out[rows, 16]  =  panel [rows, d_input]  *  tile [16, d_input]^T
//! ```
//!
//! Each row of a tile has a vector lane, in which its products are summed. Rows of inputs are
//! packed into panels of a few rows, once for all tiles: as bytes with a scale per 32 for integer
//! weights ([`integers`]), unchanged for float weights ([`floats`]).

mod floats;
mod integers;
mod lanes;
#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::sync::OnceLock;

use rayon::prelude::*;

use self::floats::FloatTile;
use self::integers::IntegerTile;
use self::lanes::{Lanes, Portable};
use crate::quant::Format;
use crate::quant::blocks::BlockFormat;
use crate::quant::tiles::TILE;

/// Instruction sets that have kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Instructions {
    /// Arrays, vectorised by the compiler.
    Portable,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    AvxVnni,
    #[cfg(target_arch = "x86_64")]
    Avx512Vnni,
    #[cfg(target_arch = "aarch64")]
    Neon,
}

impl Instructions {
    /// Those that the processor has, the best last.
    pub(crate) fn available() -> Vec<Self> {
        let mut all = vec![Self::Portable];
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 =
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
            let vnni = is_x86_feature_detected!("avxvnni");
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vnni");
            let found = [(avx2, Self::Avx2), (avx2 && vnni, Self::AvxVnni), (avx2 && avx512, Self::Avx512Vnni)];
            all.extend(found.into_iter().filter(|(found, _)| *found).map(|(_, own)| own));
        }
        #[cfg(target_arch = "aarch64")]
        all.push(Self::Neon);
        all
    }

    /// The best that the processor has.
    pub(crate) fn best() -> Self {
        static BEST: OnceLock<Instructions> = OnceLock::new();
        *BEST.get_or_init(|| Self::available().into_iter().last().unwrap_or(Self::Portable))
    }

    /// Its name in messages.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Portable => "portable",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "AVX2",
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni => "AVX-VNNI",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => "AVX-512 VNNI",
            #[cfg(target_arch = "aarch64")]
            Self::Neon => "NEON",
        }
    }

    /// Rows of the next panel, if `left` rows are left.
    fn panel_rows(self, left: usize) -> usize {
        let most = match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => WITH_32_REGISTERS,
            _ => FEW,
        };
        match left {
            1 => 1,
            2..=FEW => FEW,
            _ => most,
        }
    }

    /// Runs a job with these instructions.
    fn run<J: Job>(self, job: J) {
        match self {
            Self::Portable => job.run(Portable),
            // SAFETY: `available` has found these instructions.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { with_avx2(job) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::AvxVnni => unsafe { with_avx_vnni(job) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512Vnni => unsafe { with_avx512(job) },
            #[cfg(target_arch = "aarch64")]
            Self::Neon => job.run(neon::Neon),
        }
    }
}

/// Rows of a small panel.
const FEW: usize = 4;
/// The same with 32 vector registers of 512 bits.
#[cfg(target_arch = "x86_64")]
const WITH_32_REGISTERS: usize = 8;

/// Work that is generic over instructions. Everything that it calls is inlined.
trait Job {
    fn run<L: Lanes>(self, lanes: L);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn with_avx2<J: Job>(job: J) {
    job.run(x86::Avx2::<false>);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
fn with_avx_vnni<J: Job>(job: J) {
    job.run(x86::Avx2::<true>);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
fn with_avx512<J: Job>(job: J) {
    job.run(x86::Avx512);
}

/// Evaluates an expression with the type of a format's tiles.
macro_rules! with_tile {
    ($format:expr, integers $integer:ident => $of_integers:expr, floats $float:ident => $of_floats:expr) => {
        match $format {
            Format::Blocks(BlockFormat::Q8_0) => {
                type $integer = integers::Q8_0;
                $of_integers
            }
            Format::Blocks(BlockFormat::Q4_0) => {
                type $integer = integers::Q4_0;
                $of_integers
            }
            Format::Blocks(BlockFormat::Q4K) => {
                type $integer = integers::Q4K;
                $of_integers
            }
            Format::Blocks(BlockFormat::Q6K) => {
                type $integer = integers::Q6K;
                $of_integers
            }
            Format::F16 => {
                type $float = floats::Half;
                $of_floats
            }
            Format::Bf16 => {
                type $float = floats::Brain;
                $of_floats
            }
            other => unreachable!("{} has no tiles", other.name()),
        }
    };
}

/// Rows of inputs as the format's kernel reads them.
pub(crate) struct Packed {
    instructions: Instructions,
    format: Format,
    d_input: usize,
    panels: Vec<Panel>,
    values: Vec<f32>,
}

/// A panel: its first row, its rows, its rows with padding, and its start in `values`.
struct Panel {
    first: usize,
    rows: usize,
    panel_rows: usize,
    begin: usize,
}

fn bytes_mut(values: &mut [f32]) -> &mut [u8] {
    // SAFETY: an f32 is four bytes of any value, and bytes have no alignment.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), std::mem::size_of_val(values)) }
}

impl Packed {
    /// Packs `x`, `[rows, d_input]`.
    pub(crate) fn new(format: Format, x: &[f32], d_input: usize) -> Self {
        Self::with(Instructions::best(), format, x, d_input)
    }

    fn with(instructions: Instructions, format: Format, x: &[f32], d_input: usize) -> Self {
        let rows = x.len() / d_input;
        // f32 elements per row.
        let size = with_tile!(format,
            integers F => d_input / integers::GROUP * integers::panel_bytes(F::SCALES, F::LEAST) / 4,
            floats _F => d_input
        );
        let (mut panels, mut first, mut begin) = (Vec::new(), 0, 0);
        while first < rows {
            let panel_rows = instructions.panel_rows(rows - first);
            let own = panel_rows.min(rows - first);
            panels.push(Panel { first, rows: own, panel_rows, begin });
            first += own;
            begin += panel_rows * size;
        }
        let mut values = vec![0.0f32; begin];
        let mut rest = &mut values[..];
        let mut parts = Vec::with_capacity(panels.len());
        for panel in &panels {
            let (own, behind) = rest.split_at_mut(panel.panel_rows * size);
            parts.push((panel, own));
            rest = behind;
        }
        let fill = |(panel, own): (&Panel, &mut [f32])| {
            let x = &x[panel.first * d_input..][..panel.rows * d_input];
            instructions.run(Fill { format, x, d_input, panel_rows: panel.panel_rows, out: own });
        };
        match parts.len() {
            0..=2 => parts.into_iter().for_each(fill),
            _ => parts.into_par_iter().for_each(fill),
        }
        Self { instructions, format, d_input, panels, values }
    }

    /// Multiplies all rows with tiles, and stores the first `columns` columns at `out`, whose rows
    /// are `stride` apart.
    ///
    /// # Safety
    /// `out` must have room for `[rows, columns]`, and nothing else may access it meanwhile.
    pub(crate) unsafe fn multiply(&self, tiles: &[i32], columns: usize, out: *mut f32, stride: usize) {
        let tile_words = tiles.len() / columns.div_ceil(TILE);
        self.instructions.run(Multiply { packed: self, tiles, tile_words, columns, out, stride });
    }
}

struct Fill<'a> {
    format: Format,
    x: &'a [f32],
    d_input: usize,
    panel_rows: usize,
    out: &'a mut [f32],
}

impl Job for Fill<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self, _lanes: L) {
        let Self { format, x, d_input, panel_rows, out } = self;
        with_tile!(format,
            integers F => integers::fill_panel::<F>(x, d_input, panel_rows, bytes_mut(out)),
            floats _F => floats::fill_panel(x, d_input, panel_rows, out)
        );
    }
}

struct Multiply<'a> {
    packed: &'a Packed,
    tiles: &'a [i32],
    tile_words: usize,
    columns: usize,
    out: *mut f32,
    stride: usize,
}

impl Job for Multiply<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        with_tile!(self.packed.format,
            integers F => {
                assert!(self.tile_words * 4 >= self.packed.d_input / (F::GROUPS * integers::GROUP) * F::BYTES);
                for panel in &self.packed.panels {
                    match panel.panel_rows {
                        1 => self.integers::<L, F, 1>(lanes, panel),
                        FEW => self.integers::<L, F, FEW>(lanes, panel),
                        _ => self.integers::<L, F, 8>(lanes, panel),
                    }
                }
            },
            floats F => {
                assert!(self.tile_words * 2 >= self.packed.d_input * TILE);
                for panel in &self.packed.panels {
                    match panel.panel_rows {
                        1 => self.floats::<L, F, 1>(lanes, panel),
                        FEW => self.floats::<L, F, FEW>(lanes, panel),
                        _ => self.floats::<L, F, 8>(lanes, panel),
                    }
                }
            }
        );
    }
}

/// Tiles of floats that are multiplied together.
const TOGETHER: usize = 2;

impl Multiply<'_> {
    #[inline(always)]
    fn integers<L: Lanes, F: IntegerTile, const ROWS: usize>(&self, lanes: L, panel: &Panel) {
        let blocks = self.packed.d_input / (F::GROUPS * integers::GROUP);
        let inputs = self.packed.values[panel.begin..].as_ptr();
        let mut own = [[0.0f32; TILE]; ROWS];
        for (at, tile) in self.tiles.chunks_exact(self.tile_words).enumerate() {
            // SAFETY: `run` was called with the processor's own instructions and checked that a
            // tile has all blocks. A panel has the length that its rows need.
            unsafe {
                let out = own.as_mut_ptr().cast();
                integers::product::<L, F, ROWS>(lanes, tile.as_ptr().cast(), blocks, inputs.cast(), out);
            }
            self.put(panel, at, &own);
        }
    }

    #[inline(always)]
    fn floats<L: Lanes, F: FloatTile, const ROWS: usize>(&self, lanes: L, panel: &Panel) {
        let inputs = self.packed.values[panel.begin..].as_ptr();
        let (apart, columns) = (4 * self.tile_words, self.packed.d_input);
        let mut own = [[[0.0f32; TILE]; ROWS]; TOGETHER];
        for (index, tiles) in self.tiles.chunks(TOGETHER * self.tile_words).enumerate() {
            let (first, tile, out) = (index * TOGETHER, tiles.as_ptr().cast(), own.as_mut_ptr().cast());
            let whole = tiles.len() == TOGETHER * self.tile_words;
            // SAFETY: as in `integers`.
            unsafe {
                match whole {
                    true => floats::product::<L, F, ROWS, TOGETHER>(lanes, tile, apart, columns, inputs, out),
                    false => floats::product::<L, F, ROWS, 1>(lanes, tile, apart, columns, inputs, out),
                }
            }
            for (at, own) in own.iter().take(tiles.len() / self.tile_words).enumerate() {
                self.put(panel, first + at, own);
            }
        }
    }

    /// Copies the result of a tile to the destination.
    #[inline(always)]
    fn put<const ROWS: usize>(&self, panel: &Panel, tile: usize, own: &[[f32; TILE]; ROWS]) {
        let first = tile * TILE;
        let width = TILE.min(self.columns - first);
        for (row, own) in own.iter().take(panel.rows).enumerate() {
            // SAFETY: the caller of `multiply` guarantees room for these columns of these rows.
            unsafe {
                let at = self.out.add((panel.first + row) * self.stride + first);
                at.copy_from_nonoverlapping(own.as_ptr(), width);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::tiles::tile_rows;
    use crate::quant::{QuantizedRow, RowFormat, with_format};
    use crate::random::RandomKey;

    const FORMATS: [Format; 6] = [
        Format::Blocks(BlockFormat::Q8_0),
        Format::Blocks(BlockFormat::Q4_0),
        Format::Blocks(BlockFormat::Q4K),
        Format::Blocks(BlockFormat::Q6K),
        Format::F16,
        Format::Bf16,
    ];

    /// Two tiles of random bits with scales of order one, row-major and as tiles.
    fn tiles(format: Format, d_input: usize) -> (Vec<i32>, Vec<i32>, usize) {
        let words_each = format.layout(d_input).expect("rows of whole blocks").words;
        let key = RandomKey::new(d_input as u64);
        let mut words: Vec<i32> =
            (0..2 * TILE * words_each).map(|at| (key.uniform(0, at as u32) * 4_294_967_295.0) as u32 as i32).collect();
        let halves: (usize, &[usize]) = match format {
            Format::Blocks(BlockFormat::Q4K) => (144, &[0, 2]),
            Format::Blocks(BlockFormat::Q6K) => (210, &[208]),
            Format::Blocks(format) => (format.bytes(), &[0]),
            _ => (2, &[0]),
        };
        for (row, words) in words.chunks_exact_mut(words_each).enumerate() {
            // SAFETY: as for `bytes_mut`.
            let bytes = unsafe { std::slice::from_raw_parts_mut(words.as_mut_ptr().cast::<u8>(), 4 * words.len()) };
            for (at, block) in bytes.chunks_exact_mut(halves.0).enumerate() {
                for half in halves.1 {
                    let value = (key.uniform(row as u32 + 1, at as u32) - 0.5) as f32;
                    let bits = match format {
                        Format::Bf16 => half::bf16::from_f32(value).to_bits(),
                        _ => half::f16::from_f32(value).to_bits(),
                    };
                    block[*half..half + 2].copy_from_slice(&bits.to_le_bytes());
                }
            }
        }
        let mut tiles = words.clone();
        for tile in tiles.chunks_exact_mut(TILE * words_each) {
            tile_rows(format.tiles().expect("tiles"), tile, &mut Vec::new());
        }
        (words, tiles, words_each)
    }

    fn inputs(rows: usize, d_input: usize) -> Vec<f32> {
        let key = RandomKey::new(7);
        let value =
            |at: usize| (key.uniform(1, at as u32) - 0.5) as f32 * if at.is_multiple_of(97) { 30.0 } else { 1.0 };
        (0..rows * d_input).map(value).collect()
    }

    fn products(instructions: Instructions, format: Format, x: &[f32], d_input: usize, tiles: &[i32]) -> Vec<f32> {
        const COLUMNS: usize = 2 * TILE - 3;
        let mut out = vec![f32::NAN; x.len() / d_input * COLUMNS];
        let packed = Packed::with(instructions, format, x, d_input);
        // SAFETY: `out` has room for all rows of `COLUMNS` columns.
        unsafe { packed.multiply(tiles, COLUMNS, out.as_mut_ptr(), COLUMNS) };
        out
    }

    #[test]
    fn all_instructions_give_the_same_and_nearly_that_of_the_dequantized_weights() {
        for format in FORMATS {
            for (rows, d_input) in [(1, 256), (2, 512), (5, 256), (8, 768), (13, 1024), (23, 256)] {
                let (words, tiles, words_each) = tiles(format, d_input);
                let x = inputs(rows, d_input);
                let own: Vec<Vec<f32>> = Instructions::available()
                    .into_iter()
                    .map(|instructions| products(instructions, format, &x, d_input, &tiles))
                    .collect();
                let columns = own[0].len() / rows;
                for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
                    let what = format!("{format:?} {rows}x{d_input}, {row}, {column}");
                    let mut weights = vec![0.0; d_input];
                    let stored = QuantizedRow { words: &words[column * words_each..][..words_each], scales: &[] };
                    with_format!(format, F => F::dequantize(stored, &mut weights));
                    let x = &x[row * d_input..][..d_input];
                    let pairs = || x.iter().zip(&weights).map(|(x, w)| f64::from(*x) * f64::from(*w));
                    let (exact, size) = (pairs().sum::<f64>(), pairs().map(|x| x * x).sum::<f64>().sqrt());
                    let bound = if format.rounds_inputs() {
                        // Each input is off by up to half a step, 1/127 of the largest of its 32,
                        // with random sign.
                        let step = |(x, w): (&[f32], &[f32])| {
                            let largest = x.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
                            w.iter().map(|w| f64::from(w * largest / 254.0).powi(2)).sum::<f64>()
                        };
                        4.0 * x.chunks(32).zip(weights.chunks(32)).map(step).sum::<f64>().sqrt()
                    } else {
                        1e-5 * size
                    };
                    for (own, instructions) in own.iter().zip(Instructions::available()) {
                        let value = own[row * columns + column];
                        let error = (f64::from(value) - exact).abs();
                        assert!(error <= bound, "{what}, {instructions:?}: {value}, and not {exact}");
                    }
                    let [first, rest @ ..] = &own[..] else { unreachable!("portable") };
                    for (other, instructions) in rest.iter().zip(&Instructions::available()[1..]) {
                        let [a, b] = [first, other].map(|own| own[row * columns + column]);
                        let same = if format.rounds_inputs() { a == b } else { f64::from(a - b).abs() <= bound };
                        assert!(same, "{what}, {instructions:?}: {b}, portable {a}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_number_that_is_none_is_not_lost() {
        for format in FORMATS {
            let (_, tiles, _) = tiles(format, 256);
            for value in [f32::NAN, f32::INFINITY] {
                let mut x = inputs(5, 256);
                x[3 * 256 + 77] = value;
                for instructions in Instructions::available() {
                    let own = products(instructions, format, &x, 256, &tiles);
                    let columns = own.len() / 5;
                    for (row, own) in own.chunks_exact(columns).enumerate() {
                        let finite = own.iter().filter(|x| x.is_finite()).count();
                        assert_eq!(finite, if row == 3 { 0 } else { columns }, "{format:?} {instructions:?} {row}");
                    }
                }
            }
        }
    }
}
