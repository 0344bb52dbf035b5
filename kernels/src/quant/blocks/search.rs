//! Search for the scales and minimums of a block of 256 weights whose group scales are quantized.
//!
//! It minimizes the squared error by alternation. For each group, from several starts: the scale
//! and minimum by least squares for fixed quants, then the quants for a fixed scale. For the block:
//! the two factors by least squares for fixed codes, then the codes of each group among their
//! neighbours for fixed factors.

use half::f16;

/// Weights per block.
const WEIGHTS: usize = 256;
/// Starts: how many quants wider than the full range the weights are spread.
const STARTS: [f32; 9] = [-1.2, -0.8, -0.5, -0.25, 0.0, 0.25, 0.5, 0.8, 1.2];
/// Least-squares rounds per start, and for the factors of a block.
const TURNS: usize = 2;

/// Field sizes of `factors[0] * scale * quant - factors[1] * least`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Affine {
    /// Bits of a quant, unsigned.
    pub(super) bits: u32,
    /// Bits of a scale and of a minimum, unsigned.
    pub(super) code_bits: u32,
}

/// The result for a block of `GROUPS` groups.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fit<const GROUPS: usize> {
    /// Factors of the scales and of the minimums, rounded to f16.
    pub(super) factors: [f32; 2],
    pub(super) scales: [i32; GROUPS],
    pub(super) leasts: [i32; GROUPS],
    pub(super) quants: [i32; WEIGHTS],
}

/// The nearest integer, for magnitudes below 2^22.
#[inline(always)]
fn nearest(value: f32) -> f32 {
    const SHIFT: f32 = 12_582_912.0;
    value.clamp(-4e6, 4e6) + SHIFT - SHIFT
}

#[inline(always)]
fn inverse(value: f32) -> f32 {
    if value == 0.0 { 0.0 } else { 1.0 / value }
}

fn half(value: f32) -> f32 {
    f16::from_f32(value.clamp(-65504.0, 65504.0)).to_f32()
}

/// Sums for least squares.
#[derive(Clone, Copy, Default)]
struct Sums {
    q: f32,
    qq: f32,
    x: f32,
    xq: f32,
}

/// The squared error of a group rounded to `scale * quant - least`, and the sums of its quants.
#[inline(always)]
fn round<const GROUP: usize>(group: &[f32], scale: f32, least: f32, range: [f32; 2]) -> (f32, Sums) {
    let by = inverse(scale);
    let (mut error, mut sums) = (0.0, Sums::default());
    for x in &group[..GROUP] {
        let q = nearest((x + least) * by).clamp(range[0], range[1]);
        let off = x - (scale * q - least);
        error += off * off;
        sums.q += q;
        sums.qq += q * q;
        sums.x += x;
        sums.xq += x * q;
    }
    (error, sums)
}

/// The scale and the non-negative minimum with the smallest squared error for a group.
fn scale_and_least<const GROUP: usize>(group: &[f32], highest: f32) -> [f32; 2] {
    let (lowest, most) = group.iter().fold((0.0f32, f32::MIN), |(lowest, most), x| (lowest.min(*x), most.max(*x)));
    if most <= lowest {
        return [0.0, -lowest];
    }
    let mut best = ([0.0, -lowest], f32::INFINITY);
    for start in STARTS {
        let (mut scale, mut least) = ((most - lowest) / (highest + start), -lowest);
        for turn in 0..=TURNS {
            let (error, sums) = round::<GROUP>(group, scale, least, [0.0, highest]);
            if error < best.1 {
                best = ([scale, least], error);
            }
            let n = GROUP as f32;
            let spread = n * sums.qq - sums.q * sums.q;
            if turn == TURNS || spread <= 0.0 {
                break;
            }
            scale = (n * sums.xq - sums.q * sums.x) / spread;
            least = (sums.q * scale - sums.x) / n;
            if least < 0.0 {
                (scale, least) = (sums.xq * inverse(sums.qq), 0.0);
            }
            if scale <= 0.0 {
                break;
            }
        }
    }
    best.0
}

/// The scale, possibly negative, with the smallest squared error for quants from `-half` to
/// `half - 1`.
fn scale_alone<const GROUP: usize>(group: &[f32], half: f32) -> f32 {
    let extreme = group.iter().fold(0.0f32, |extreme, x| if x.abs() > extreme.abs() { *x } else { extreme });
    let mut best = (0.0, f32::INFINITY);
    if extreme == 0.0 {
        return 0.0;
    }
    for (start, end) in STARTS.into_iter().flat_map(|start| [(start, -half), (start, half - 1.0)]) {
        let mut scale = extreme / (end + end.signum() * start);
        for turn in 0..=TURNS {
            let (error, sums) = round::<GROUP>(group, scale, 0.0, [-half, half - 1.0]);
            if error < best.1 {
                best = (scale, error);
            }
            if turn == TURNS || sums.qq == 0.0 {
                break;
            }
            scale = sums.xq / sums.qq;
        }
    }
    best.0
}

/// Fits a block of weights `factors[0] * scale * quant - factors[1] * least`.
pub(super) fn shifted<const GROUPS: usize, const GROUP: usize>(weights: &[f32], format: Affine) -> Fit<GROUPS> {
    let (highest, most) = (((1 << format.bits) - 1) as f32, ((1 << format.code_bits) - 1) as f32);
    let groups = || weights.chunks_exact(GROUP);
    let mut found = [[0.0f32; 2]; GROUPS];
    found.iter_mut().zip(groups()).for_each(|(found, group)| *found = scale_and_least::<GROUP>(group, highest));
    let largest = |part: usize| found.iter().fold(0.0f32, |largest, found| largest.max(found[part]));
    let mut factors = [half(largest(0) / most), half(largest(1) / most)];
    let mut best: Option<(Fit<GROUPS>, f32)> = None;
    for _ in 0..=TURNS {
        let mut fit = Fit { factors, scales: [0; GROUPS], leasts: [0; GROUPS], quants: [0; WEIGHTS] };
        let mut error = 0.0;
        // Normal equations of both factors.
        let (mut aa, mut ab, mut bb, mut ax, mut bx) = (0.0f32, 0.0f32, 0.0f32, 0.0f32, 0.0f32);
        for (at, group) in groups().enumerate() {
            let code = |part: usize| nearest(found[at][part] * inverse(factors[part])).clamp(0.0, most);
            let mut nearby = ([0.0, 0.0], f32::INFINITY, Sums::default());
            for scale in [-1.0, 0.0, 1.0].map(|step| code(0) + step) {
                for least in [-1.0, 0.0, 1.0].map(|step| code(1) + step) {
                    if !(0.0..=most).contains(&scale) || !(0.0..=most).contains(&least) {
                        continue;
                    }
                    let (off, sums) = round::<GROUP>(group, factors[0] * scale, factors[1] * least, [0.0, highest]);
                    if off < nearby.1 {
                        nearby = ([scale, least], off, sums);
                    }
                }
            }
            let ([scale, least], off, sums) = nearby;
            error += off;
            (fit.scales[at], fit.leasts[at]) = (scale as i32, least as i32);
            let (scale_used, least_used) = (factors[0] * scale, factors[1] * least);
            let by = inverse(scale_used);
            for (quant, x) in fit.quants[at * GROUP..].iter_mut().zip(group) {
                *quant = nearest((x + least_used) * by).clamp(0.0, highest) as i32;
            }
            aa += scale * scale * sums.qq;
            ab -= scale * least * sums.q;
            bb += least * least * GROUP as f32;
            ax += scale * sums.xq;
            bx -= least * sums.x;
        }
        if best.as_ref().is_none_or(|(_, known)| error < *known) {
            best = Some((fit, error));
        }
        let determinant = aa * bb - ab * ab;
        let [d, dmin] = if determinant > 1e-6 * aa * bb {
            [(ax * bb - bx * ab) / determinant, (aa * bx - ab * ax) / determinant]
        } else {
            [ax * inverse(aa), factors[1]]
        };
        if !(d > 0.0 && dmin >= 0.0) {
            break;
        }
        factors = [half(d), half(dmin)];
    }
    best.map(|(fit, _)| fit).unwrap_or(Fit {
        factors: [0.0; 2],
        scales: [0; GROUPS],
        leasts: [0; GROUPS],
        quants: [0; WEIGHTS],
    })
}

/// Fits a block of weights `factors[0] * scale * quant` with scales in signed bytes and signed
/// quants of `bits` bits.
pub(super) fn scaled<const GROUPS: usize, const GROUP: usize>(weights: &[f32], bits: u32) -> Fit<GROUPS> {
    let range = (1 << (bits - 1)) as f32;
    let groups = || weights.chunks_exact(GROUP);
    let mut found = [0.0f32; GROUPS];
    found.iter_mut().zip(groups()).for_each(|(found, group)| *found = scale_alone::<GROUP>(group, range));
    let extreme = found.iter().fold(0.0f32, |extreme, x| if x.abs() > extreme.abs() { *x } else { extreme });
    let mut factor = half(extreme / -128.0);
    let mut best: Option<(Fit<GROUPS>, f32)> = None;
    for _ in 0..=TURNS {
        let mut fit = Fit { factors: [factor, 0.0], scales: [0; GROUPS], leasts: [0; GROUPS], quants: [0; WEIGHTS] };
        let (mut error, mut aa, mut ax) = (0.0, 0.0f32, 0.0f32);
        for (at, group) in groups().enumerate() {
            let code = nearest(found[at] * inverse(factor)).clamp(-128.0, 127.0);
            let mut nearby = (0.0, f32::INFINITY, Sums::default());
            for scale in [-1.0, 0.0, 1.0].map(|step| (code + step).clamp(-128.0, 127.0)) {
                let (off, sums) = round::<GROUP>(group, factor * scale, 0.0, [-range, range - 1.0]);
                if off < nearby.1 {
                    nearby = (scale, off, sums);
                }
            }
            let (scale, off, sums) = nearby;
            error += off;
            fit.scales[at] = scale as i32;
            let by = inverse(factor * scale);
            for (quant, x) in fit.quants[at * GROUP..].iter_mut().zip(group) {
                *quant = nearest(x * by).clamp(-range, range - 1.0) as i32;
            }
            aa += scale * scale * sums.qq;
            ax += scale * sums.xq;
        }
        if best.as_ref().is_none_or(|(_, known)| error < *known) {
            best = Some((fit, error));
        }
        if aa == 0.0 {
            break;
        }
        factor = half(ax / aa);
    }
    best.map(|(fit, _)| fit).unwrap_or(Fit {
        factors: [0.0; 2],
        scales: [0; GROUPS],
        leasts: [0; GROUPS],
        quants: [0; WEIGHTS],
    })
}
