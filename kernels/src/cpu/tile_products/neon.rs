//! NEON, which every 64-bit ARM processor has.

#![allow(unused_unsafe, reason = "most instructions are safe where the architecture has them, and some are not")]

use std::arch::aarch64::*;

use super::lanes::Lanes;

/// NEON.
#[derive(Clone, Copy)]
pub(super) struct Neon;

/// Sixteen lanes are four vectors.
type Four<T> = [T; 4];

#[inline(always)]
fn each<A: Copy, R>(a: Four<A>, f: impl Fn(A) -> R) -> Four<R> {
    a.map(f)
}

#[inline(always)]
fn pairs<A: Copy, B: Copy, R>(a: Four<A>, b: Four<B>, f: impl Fn(A, B) -> R) -> Four<R> {
    std::array::from_fn(|i| f(a[i], b[i]))
}

// SAFETY: for all methods below, NEON is part of the architecture, and the trait's caller
// guarantees that pointers are valid. Loads and stores are unaligned.
impl Lanes for Neon {
    type Bytes = Four<uint8x16_t>;
    type Ints = Four<int32x4_t>;
    type Floats = Four<float32x4_t>;

    #[inline(always)]
    unsafe fn bytes(self, at: *const u8) -> Self::Bytes {
        std::array::from_fn(|i| unsafe { vld1q_u8(at.add(16 * i)) })
    }
    #[inline(always)]
    unsafe fn and(self, a: Self::Bytes, mask: u8) -> Self::Bytes {
        each(a, |a| unsafe { vandq_u8(a, vdupq_n_u8(mask)) })
    }
    #[inline(always)]
    unsafe fn xor(self, a: Self::Bytes, mask: u8) -> Self::Bytes {
        each(a, |a| unsafe { veorq_u8(a, vdupq_n_u8(mask)) })
    }
    #[inline(always)]
    unsafe fn or(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes {
        pairs(a, b, |a, b| unsafe { vorrq_u8(a, b) })
    }
    #[inline(always)]
    unsafe fn shifted_down(self, a: Self::Bytes, bits: u32) -> Self::Bytes {
        each(a, |a| unsafe {
            let pairs = vshlq_u16(vreinterpretq_u16_u8(a), vdupq_n_s16(-(bits as i16)));
            vreinterpretq_u8_u16(pairs)
        })
    }
    #[inline(always)]
    unsafe fn shifted_up(self, a: Self::Bytes, bits: u32) -> Self::Bytes {
        each(a, |a| unsafe {
            let pairs = vshlq_u16(vreinterpretq_u16_u8(a), vdupq_n_s16(bits as i16));
            vreinterpretq_u8_u16(pairs)
        })
    }
    #[inline(always)]
    unsafe fn dot(self, sum: Self::Ints, bytes: Self::Bytes, four: i32) -> Self::Ints {
        // Multiply bytes to 16-bit products, four per lane, and add neighbours twice.
        pairs(sum, bytes, |sum, bytes| unsafe {
            let inputs = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)));
            let wide = |half: uint8x8_t| vreinterpretq_s16_u16(vmovl_u8(half));
            let (low, high) = (wide(vget_low_u8(bytes)), wide(vget_high_u8(bytes)));
            let products = |half: int16x8_t| {
                vpaddq_s32(
                    vmull_s16(vget_low_s16(half), vget_low_s16(inputs)),
                    vmull_s16(vget_high_s16(half), vget_high_s16(inputs)),
                )
            };
            vaddq_s32(sum, vpaddq_s32(products(low), products(high)))
        })
    }
    #[inline(always)]
    unsafe fn ints(self, value: i32) -> Self::Ints {
        [unsafe { vdupq_n_s32(value) }; 4]
    }
    #[inline(always)]
    unsafe fn unsigned(self, at: *const u8) -> Self::Ints {
        unsafe {
            let bytes = vld1q_u8(at);
            let (low, high) = (vmovl_u8(vget_low_u8(bytes)), vmovl_u8(vget_high_u8(bytes)));
            let wide = [vget_low_u16(low), vget_high_u16(low), vget_low_u16(high), vget_high_u16(high)];
            each(wide, |half| vreinterpretq_s32_u32(vmovl_u16(half)))
        }
    }
    #[inline(always)]
    unsafe fn signed(self, at: *const u8) -> Self::Ints {
        unsafe {
            let bytes = vreinterpretq_s8_u8(vld1q_u8(at));
            let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_s8(vget_high_s8(bytes)));
            let wide = [vget_low_s16(low), vget_high_s16(low), vget_low_s16(high), vget_high_s16(high)];
            each(wide, |half| vmovl_s16(half))
        }
    }
    #[inline(always)]
    unsafe fn converted(self, a: Self::Ints) -> Self::Floats {
        each(a, |a| unsafe { vcvtq_f32_s32(a) })
    }
    #[inline(always)]
    unsafe fn floats(self, value: f32) -> Self::Floats {
        [unsafe { vdupq_n_f32(value) }; 4]
    }
    #[inline(always)]
    unsafe fn halves(self, at: *const u8) -> Self::Floats {
        // SAFETY: guaranteed by the caller: there are 32 bytes.
        let bits = unsafe { at.cast::<[u16; 16]>().read_unaligned() };
        let values = bits.map(|bits| half::f16::from_bits(bits).to_f32());
        std::array::from_fn(|i| unsafe { vld1q_f32(values.as_ptr().add(4 * i)) })
    }
    #[inline(always)]
    unsafe fn brains(self, at: *const u8) -> Self::Floats {
        std::array::from_fn(|i| unsafe {
            let bits = vld1_u16(at.add(8 * i).cast());
            vreinterpretq_f32_u32(vshlq_n_u32::<16>(vmovl_u16(bits)))
        })
    }
    #[inline(always)]
    unsafe fn add(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        pairs(a, b, |a, b| unsafe { vaddq_f32(a, b) })
    }
    #[inline(always)]
    unsafe fn sub(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        pairs(a, b, |a, b| unsafe { vsubq_f32(a, b) })
    }
    #[inline(always)]
    unsafe fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        pairs(a, b, |a, b| unsafe { vmulq_f32(a, b) })
    }
    #[inline(always)]
    unsafe fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats {
        std::array::from_fn(|i| unsafe { vfmaq_f32(c[i], a[i], b[i]) })
    }
    #[inline(always)]
    unsafe fn store(self, a: Self::Floats, at: *mut f32) {
        for (i, a) in a.into_iter().enumerate() {
            unsafe { vst1q_f32(at.add(4 * i), a) };
        }
    }
}
