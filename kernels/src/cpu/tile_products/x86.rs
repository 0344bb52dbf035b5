//! x86: AVX-512 with VNNI, and AVX2 with or without AVX-VNNI.

use std::arch::x86_64::*;

use super::lanes::Lanes;

/// AVX-512 (F and BW) with VNNI.
#[derive(Clone, Copy)]
pub(super) struct Avx512;

// SAFETY: for all methods below, the trait's caller guarantees that the processor has the
// instructions and that pointers are valid. Loads and stores are unaligned.
impl Lanes for Avx512 {
    type Bytes = __m512i;
    type Ints = __m512i;
    type Floats = __m512;

    #[inline(always)]
    unsafe fn bytes(self, at: *const u8) -> __m512i {
        unsafe { _mm512_loadu_si512(at.cast()) }
    }
    #[inline(always)]
    unsafe fn and(self, a: __m512i, mask: u8) -> __m512i {
        unsafe { _mm512_and_si512(a, _mm512_set1_epi8(mask as i8)) }
    }
    #[inline(always)]
    unsafe fn xor(self, a: __m512i, mask: u8) -> __m512i {
        unsafe { _mm512_xor_si512(a, _mm512_set1_epi8(mask as i8)) }
    }
    #[inline(always)]
    unsafe fn or(self, a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_or_si512(a, b) }
    }
    #[inline(always)]
    unsafe fn shifted_down(self, a: __m512i, bits: u32) -> __m512i {
        unsafe { _mm512_srl_epi16(a, _mm_cvtsi32_si128(bits as i32)) }
    }
    #[inline(always)]
    unsafe fn shifted_up(self, a: __m512i, bits: u32) -> __m512i {
        unsafe { _mm512_sll_epi16(a, _mm_cvtsi32_si128(bits as i32)) }
    }
    #[inline(always)]
    unsafe fn dot(self, sum: __m512i, bytes: __m512i, four: i32) -> __m512i {
        unsafe { _mm512_dpbusd_epi32(sum, bytes, _mm512_set1_epi32(four)) }
    }
    #[inline(always)]
    unsafe fn ints(self, value: i32) -> __m512i {
        unsafe { _mm512_set1_epi32(value) }
    }
    #[inline(always)]
    unsafe fn unsigned(self, at: *const u8) -> __m512i {
        unsafe { _mm512_cvtepu8_epi32(_mm_loadu_si128(at.cast())) }
    }
    #[inline(always)]
    unsafe fn signed(self, at: *const u8) -> __m512i {
        unsafe { _mm512_cvtepi8_epi32(_mm_loadu_si128(at.cast())) }
    }
    #[inline(always)]
    unsafe fn converted(self, a: __m512i) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(a) }
    }
    #[inline(always)]
    unsafe fn floats(self, value: f32) -> __m512 {
        unsafe { _mm512_set1_ps(value) }
    }
    #[inline(always)]
    unsafe fn halves(self, at: *const u8) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
    }
    #[inline(always)]
    unsafe fn brains(self, at: *const u8) -> __m512 {
        unsafe {
            let words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32(words, 16))
        }
    }
    #[inline(always)]
    unsafe fn add(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sub(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn store(self, a: __m512, at: *mut f32) {
        unsafe { _mm512_storeu_ps(at, a) }
    }
}

/// AVX2 with FMA and F16C; with `VNNI` bytes are multiplied by AVX-VNNI.
#[derive(Clone, Copy)]
pub(super) struct Avx2<const VNNI: bool>;

/// Sixteen lanes are two vectors.
type Two<T> = [T; 2];

// SAFETY: as above.
impl<const VNNI: bool> Lanes for Avx2<VNNI> {
    type Bytes = Two<__m256i>;
    type Ints = Two<__m256i>;
    type Floats = Two<__m256>;

    #[inline(always)]
    unsafe fn bytes(self, at: *const u8) -> Self::Bytes {
        unsafe { [_mm256_loadu_si256(at.cast()), _mm256_loadu_si256(at.add(32).cast())] }
    }
    #[inline(always)]
    unsafe fn and(self, a: Self::Bytes, mask: u8) -> Self::Bytes {
        unsafe {
            let mask = _mm256_set1_epi8(mask as i8);
            [_mm256_and_si256(a[0], mask), _mm256_and_si256(a[1], mask)]
        }
    }
    #[inline(always)]
    unsafe fn xor(self, a: Self::Bytes, mask: u8) -> Self::Bytes {
        unsafe {
            let mask = _mm256_set1_epi8(mask as i8);
            [_mm256_xor_si256(a[0], mask), _mm256_xor_si256(a[1], mask)]
        }
    }
    #[inline(always)]
    unsafe fn or(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes {
        unsafe { [_mm256_or_si256(a[0], b[0]), _mm256_or_si256(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn shifted_down(self, a: Self::Bytes, bits: u32) -> Self::Bytes {
        unsafe {
            let bits = _mm_cvtsi32_si128(bits as i32);
            [_mm256_srl_epi16(a[0], bits), _mm256_srl_epi16(a[1], bits)]
        }
    }
    #[inline(always)]
    unsafe fn shifted_up(self, a: Self::Bytes, bits: u32) -> Self::Bytes {
        unsafe {
            let bits = _mm_cvtsi32_si128(bits as i32);
            [_mm256_sll_epi16(a[0], bits), _mm256_sll_epi16(a[1], bits)]
        }
    }
    #[inline(always)]
    unsafe fn dot(self, sum: Self::Ints, bytes: Self::Bytes, four: i32) -> Self::Ints {
        unsafe {
            let four = _mm256_set1_epi32(four);
            if VNNI {
                return [
                    _mm256_dpbusd_avx_epi32(sum[0], bytes[0], four),
                    _mm256_dpbusd_avx_epi32(sum[1], bytes[1], four),
                ];
            }
            // Pairs of products of bytes do not fit 16 bits: even and odd bytes are summed
            // separately.
            let even = _mm256_set1_epi16(0xff);
            let four_even = _mm256_srai_epi16(_mm256_slli_epi16(four, 8), 8);
            let four_odd = _mm256_srai_epi16(four, 8);
            let one = |sum: __m256i, bytes: __m256i| {
                let evens = _mm256_madd_epi16(_mm256_and_si256(bytes, even), four_even);
                let odds = _mm256_madd_epi16(_mm256_srli_epi16(bytes, 8), four_odd);
                _mm256_add_epi32(sum, _mm256_add_epi32(evens, odds))
            };
            [one(sum[0], bytes[0]), one(sum[1], bytes[1])]
        }
    }
    #[inline(always)]
    unsafe fn ints(self, value: i32) -> Self::Ints {
        unsafe { [_mm256_set1_epi32(value); 2] }
    }
    #[inline(always)]
    unsafe fn unsigned(self, at: *const u8) -> Self::Ints {
        unsafe {
            [_mm256_cvtepu8_epi32(_mm_loadl_epi64(at.cast())), _mm256_cvtepu8_epi32(_mm_loadl_epi64(at.add(8).cast()))]
        }
    }
    #[inline(always)]
    unsafe fn signed(self, at: *const u8) -> Self::Ints {
        unsafe {
            [_mm256_cvtepi8_epi32(_mm_loadl_epi64(at.cast())), _mm256_cvtepi8_epi32(_mm_loadl_epi64(at.add(8).cast()))]
        }
    }
    #[inline(always)]
    unsafe fn converted(self, a: Self::Ints) -> Self::Floats {
        unsafe { [_mm256_cvtepi32_ps(a[0]), _mm256_cvtepi32_ps(a[1])] }
    }
    #[inline(always)]
    unsafe fn floats(self, value: f32) -> Self::Floats {
        unsafe { [_mm256_set1_ps(value); 2] }
    }
    #[inline(always)]
    unsafe fn halves(self, at: *const u8) -> Self::Floats {
        unsafe { [_mm256_cvtph_ps(_mm_loadu_si128(at.cast())), _mm256_cvtph_ps(_mm_loadu_si128(at.add(16).cast()))] }
    }
    #[inline(always)]
    unsafe fn brains(self, at: *const u8) -> Self::Floats {
        unsafe {
            let eight = |at: *const u8| {
                let words = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32(words, 16))
            };
            [eight(at), eight(at.add(16))]
        }
    }
    #[inline(always)]
    unsafe fn add(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn sub(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        unsafe { [_mm256_sub_ps(a[0], b[0]), _mm256_sub_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats {
        unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
    }
    #[inline(always)]
    unsafe fn store(self, a: Self::Floats, at: *mut f32) {
        unsafe {
            _mm256_storeu_ps(at, a[0]);
            _mm256_storeu_ps(at.add(8), a[1]);
        }
    }
}
