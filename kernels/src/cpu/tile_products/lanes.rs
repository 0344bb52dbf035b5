//! Vectors of sixteen lanes, one per row of a tile.

/// The instructions of a processor. After an integer sum, floats are multiplied and added in two
/// steps, so that results are bit for bit the same on every processor. Sums of floats use fused
/// multiply-add if the processor has it.
///
/// # Safety
/// For all methods: the processor must have the instructions, and pointers must be valid for the
/// bytes that are read or written, with any alignment.
pub(super) trait Lanes: Copy {
    /// Four bytes in each lane.
    type Bytes: Copy;
    /// An i32 in each lane.
    type Ints: Copy;
    /// An f32 in each lane.
    type Floats: Copy;

    /// 64 bytes.
    unsafe fn bytes(self, at: *const u8) -> Self::Bytes;
    /// `a & mask`, for each byte.
    unsafe fn and(self, a: Self::Bytes, mask: u8) -> Self::Bytes;
    /// `a ^ mask`, for each byte.
    unsafe fn xor(self, a: Self::Bytes, mask: u8) -> Self::Bytes;
    /// `a | b`.
    unsafe fn or(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;
    /// Shifts 16-bit elements right: bits of a pair's upper byte move into its lower byte.
    unsafe fn shifted_down(self, a: Self::Bytes, bits: u32) -> Self::Bytes;
    /// Shifts 16-bit elements left.
    unsafe fn shifted_up(self, a: Self::Bytes, bits: u32) -> Self::Bytes;
    /// Adds to each lane of `sum` the dot product of the lane's four unsigned bytes with the four
    /// signed bytes of `four`, none of which is -128.
    unsafe fn dot(self, sum: Self::Ints, bytes: Self::Bytes, four: i32) -> Self::Ints;

    /// The same integer in each lane.
    unsafe fn ints(self, value: i32) -> Self::Ints;
    /// 16 unsigned bytes, one per lane.
    unsafe fn unsigned(self, at: *const u8) -> Self::Ints;
    /// 16 signed bytes, one per lane.
    unsafe fn signed(self, at: *const u8) -> Self::Ints;
    /// Converts integers to floats.
    unsafe fn converted(self, a: Self::Ints) -> Self::Floats;

    /// The same float in each lane.
    unsafe fn floats(self, value: f32) -> Self::Floats;
    /// 16 values of f16.
    unsafe fn halves(self, at: *const u8) -> Self::Floats;
    /// 16 values of bf16.
    unsafe fn brains(self, at: *const u8) -> Self::Floats;
    /// Sums.
    unsafe fn add(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// Differences.
    unsafe fn sub(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// Products.
    unsafe fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a * b + c`, rounded once if the processor has such an instruction.
    unsafe fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    /// Stores 16 floats.
    unsafe fn store(self, a: Self::Floats, at: *mut f32);
}

/// Arrays, which the compiler vectorises for any processor.
#[derive(Clone, Copy)]
pub(super) struct Portable;

type Array<T> = [T; 16];

impl Lanes for Portable {
    type Bytes = [u8; 64];
    type Ints = Array<i32>;
    type Floats = Array<f32>;

    #[inline(always)]
    unsafe fn bytes(self, at: *const u8) -> Self::Bytes {
        // SAFETY: guaranteed by the caller.
        unsafe { at.cast::<[u8; 64]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn and(self, a: Self::Bytes, mask: u8) -> Self::Bytes {
        a.map(|a| a & mask)
    }
    #[inline(always)]
    unsafe fn xor(self, a: Self::Bytes, mask: u8) -> Self::Bytes {
        a.map(|a| a ^ mask)
    }
    #[inline(always)]
    unsafe fn or(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes {
        std::array::from_fn(|i| a[i] | b[i])
    }
    #[inline(always)]
    unsafe fn shifted_down(self, a: Self::Bytes, bits: u32) -> Self::Bytes {
        std::array::from_fn(|i| (u16::from_le_bytes([a[i & !1], a[i | 1]]) >> bits).to_le_bytes()[i & 1])
    }
    #[inline(always)]
    unsafe fn shifted_up(self, a: Self::Bytes, bits: u32) -> Self::Bytes {
        std::array::from_fn(|i| (u16::from_le_bytes([a[i & !1], a[i | 1]]) << bits).to_le_bytes()[i & 1])
    }
    #[inline(always)]
    unsafe fn dot(self, sum: Self::Ints, bytes: Self::Bytes, four: i32) -> Self::Ints {
        let four = four.to_le_bytes().map(|byte| i32::from(byte as i8));
        std::array::from_fn(|lane| {
            let own = &bytes[4 * lane..][..4];
            sum[lane] + (0..4).map(|i| i32::from(own[i]) * four[i]).sum::<i32>()
        })
    }
    #[inline(always)]
    unsafe fn ints(self, value: i32) -> Self::Ints {
        [value; 16]
    }
    #[inline(always)]
    unsafe fn unsigned(self, at: *const u8) -> Self::Ints {
        // SAFETY: guaranteed by the caller.
        unsafe { at.cast::<[u8; 16]>().read_unaligned() }.map(i32::from)
    }
    #[inline(always)]
    unsafe fn signed(self, at: *const u8) -> Self::Ints {
        // SAFETY: guaranteed by the caller.
        unsafe { at.cast::<[i8; 16]>().read_unaligned() }.map(i32::from)
    }
    #[inline(always)]
    unsafe fn converted(self, a: Self::Ints) -> Self::Floats {
        a.map(|a| a as f32)
    }
    #[inline(always)]
    unsafe fn floats(self, value: f32) -> Self::Floats {
        [value; 16]
    }
    #[inline(always)]
    unsafe fn halves(self, at: *const u8) -> Self::Floats {
        // SAFETY: guaranteed by the caller.
        unsafe { at.cast::<[u16; 16]>().read_unaligned() }.map(|bits| half::f16::from_bits(bits).to_f32())
    }
    #[inline(always)]
    unsafe fn brains(self, at: *const u8) -> Self::Floats {
        // SAFETY: guaranteed by the caller.
        unsafe { at.cast::<[u16; 16]>().read_unaligned() }.map(|bits| f32::from_bits(u32::from(bits) << 16))
    }
    #[inline(always)]
    unsafe fn add(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        std::array::from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn sub(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        std::array::from_fn(|i| a[i] - b[i])
    }
    #[inline(always)]
    unsafe fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        std::array::from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn mul_add(self, a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats {
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    unsafe fn store(self, a: Self::Floats, at: *mut f32) {
        // SAFETY: guaranteed by the caller.
        unsafe { at.cast::<Array<f32>>().write_unaligned(a) }
    }
}
