//! Products of a few rows with a matrix, which is read once, in its stored layout.

use pulp::{Simd, WithSimd};

use super::{LANES, sum_of};

/// The dot products of all rows of `a` with all rows of `b`, of `size` elements each, stored in
/// `out` `[rows of a, rows of b]`. Each equals [`sum_of`]'s result.
pub(crate) struct DotProducts<'a> {
    pub(crate) a: &'a [f32],
    pub(crate) b: &'a [f32],
    pub(crate) size: usize,
    pub(crate) out: &'a mut [f32],
}

impl DotProducts<'_> {
    /// Computes with the widest vectors that the processor has.
    pub(crate) fn compute(self) {
        pulp::Arch::new().dispatch(self);
    }

    /// Multiplies several rows of `a` with one row of `b` at a time, so that `b` is read once and
    /// in order. A sum has `EACH` registers.
    #[inline(always)]
    fn by_rows<S: Simd, const MOST: usize, const EACH: usize>(self, simd: S) {
        let Self { a, b, size, out } = self;
        if size == 0 || a.is_empty() {
            return out.fill(0.0);
        }
        let (rows, columns) = (a.len() / size, b.len() / size);
        for (column, b) in b.chunks_exact(size).enumerate() {
            let mut put = |first: usize, sums: &[f32]| {
                sums.iter().zip(first..).for_each(|(sum, row)| out[row * columns + column] = *sum);
            };
            let mut row = 0;
            while row + MOST <= rows {
                put(row, &sums_of_products::<S, MOST, EACH>(simd, &a[row * size..], b));
                row += MOST;
            }
            while row + 2 <= rows {
                put(row, &sums_of_products::<S, 2, EACH>(simd, &a[row * size..], b));
                row += 2;
            }
            if row < rows {
                put(row, &[sum_of(&a[row * size..][..size], b, |a, b| a * b)]);
            }
        }
    }
}

impl WithSimd for DotProducts<'_> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, simd: S) {
        match LANES / S::F32_LANES {
            1 => self.by_rows::<S, 8, 1>(simd),
            2 => self.by_rows::<S, 4, 2>(simd),
            4 => self.by_rows::<S, 4, 4>(simd),
            _ => self.by_rows::<S, 2, LANES>(simd),
        }
    }
}

/// The dot products of the first `ROWS` rows of `a` with `b`, each as in [`sum_of`].
#[inline(always)]
fn sums_of_products<S: Simd, const ROWS: usize, const EACH: usize>(simd: S, a: &[f32], b: &[f32]) -> [f32; ROWS] {
    let (size, whole) = (b.len(), b.len() / LANES * LANES);
    let a: [&[f32]; ROWS] = std::array::from_fn(|row| &a[row * size..][..size]);
    fn vectors<S: Simd>(row: &[f32]) -> &[S::f32s] {
        pulp::bytemuck::cast_slice(row)
    }
    let mut sums = [[simd.splat_f32s(0.0); EACH]; ROWS];
    let (a_vectors, b_vectors) = (a.map(|row| vectors::<S>(&row[..whole])), vectors::<S>(&b[..whole]));
    for at in (0..b_vectors.len()).step_by(EACH) {
        for part in 0..EACH {
            let b = b_vectors[at + part];
            for row in 0..ROWS {
                sums[row][part] = simd.add_f32s(sums[row][part], simd.mul_f32s(a_vectors[row][at + part], b));
            }
        }
    }
    std::array::from_fn(|row| {
        let lanes: &[f32] = pulp::bytemuck::cast_slice(&sums[row]);
        let rest: f32 = a[row][whole..].iter().zip(&b[whole..]).map(|(a, b)| a * b).sum();
        lanes.iter().sum::<f32>() + rest
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn products_of_a_few_rows_are_what_each_row_has_alone() {
        for [rows, columns, size] in
            [[1, 1, 1], [2, 3, 16], [3, 5, 40], [5, 2, 15], [11, 4, 33], [16, 7, 64], [0, 3, 5], [2, 3, 0]]
        {
            let values = |count: usize, step: usize| -> Vec<f32> {
                (0..count).map(|i| ((i * step) % 101) as f32 / 7.0 - 6.0).collect()
            };
            let (a, b) = (values(rows * size, 37), values(columns * size, 53));
            let check = |compute: &dyn Fn(DotProducts)| {
                let mut out = vec![f32::NAN; rows * columns];
                compute(DotProducts { a: &a, b: &b, size, out: &mut out });
                for row in 0..rows {
                    for column in 0..columns {
                        let (a, b) = (&a[row * size..][..size], &b[column * size..][..size]);
                        assert_eq!(out[row * columns + column], sum_of(a, b, |a, b| a * b), "{rows}x{columns}x{size}");
                    }
                }
            };
            check(&|products| products.compute());
            // Also with vectors that are narrower than this processor's.
            check(&|products| Simd::vectorize(pulp::Scalar::new(), products));
            #[cfg(target_arch = "x86_64")]
            if let Some(avx2) = pulp::x86::V3::try_new() {
                check(&|products| Simd::vectorize(avx2, products));
            }
        }
    }
}
