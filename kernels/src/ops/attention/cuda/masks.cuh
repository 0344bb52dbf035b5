// What the attention kernels of all families share: sizes, and which keys a query sees.
//
// Compiled with: MASK, DROPOUT (0, 1).

// Which keys a query sees: all; those up to its own; those of a row of its own length; those of its
// document up to its own.
enum { EVERY, UP_TO_OWN, LENGTHS, DOCUMENTS };
constexpr bool CAUSAL = MASK == UP_TO_OWN || MASK == DOCUMENTS;

struct Info {
    u64 batch, heads, kv_heads, queries, keys;
    // Keys that a query sees at the most; added to a place it stays below 2^31.
    u64 window;
    // The bits of an f32.
    u64 scale;
    DropoutInfo dropout;
};

template <class Info>
__device__ __forceinline__ float scale_of(const Info& info) {
    return __uint_as_float(static_cast<u32>(info.scale));
}

// What is known of a tile of 64 tokens of a row of documents: see documents.cu.
struct DocumentTile {
    // Of each token, the first key that it sees.
    int first[64];
    // The first key that any of these or of later tokens sees; the first one that all of these may
    // see.
    int earliest, latest;
    // Behind the last tile that sees any of the 128 keys from this tile on, where it is the first
    // half of a tile of keys.
    int end;
    int unused;
};

__device__ __forceinline__ const DocumentTile& document_tile(const void* tiles, int row, int tokens, int tile) {
    return static_cast<const DocumentTile*>(tiles)[row * ((tokens + 63) / 64) + tile];
}

// Keys of a padded row: one at the least, and no more than there are.
__device__ __forceinline__ int length_of(const void* lengths, int row, u64 keys) {
    return min(max(__ldg(static_cast<const int*>(lengths) + row), 1), static_cast<int>(keys));
}

// Blocks from `begin` to `end`.
struct Range {
    int begin, end;
};

// The blocks of `SIZE` keys that some of `rows` queries from `query` on see.
template <int SIZE>
__device__ __forceinline__ Range seen_keys(const Info& info, int query, int rows) {
    int keys = info.keys, queries = info.queries;
    if (!CAUSAL) {
        return {0, (keys + SIZE - 1) / SIZE};
    }
    int own = query + keys - queries, last = min(keys, own + rows);
    int first = max(0, own - static_cast<int>(info.window) + 1);
    return {first / SIZE, (last + SIZE - 1) / SIZE};
}

// The blocks of `SIZE` queries that see some of `rows` keys from `key` on.
template <int SIZE>
__device__ __forceinline__ Range seeing_queries(const Info& info, int key, int rows) {
    int keys = info.keys, queries = info.queries;
    if (!CAUSAL) {
        return {0, (queries + SIZE - 1) / SIZE};
    }
    int offset = keys - queries, first = max(0, key - offset);
    int end = min(queries, key + rows - 1 + static_cast<int>(info.window) - offset);
    return {first / SIZE, (end + SIZE - 1) / SIZE};
}

// From the first to the last one.
struct Span {
    int first, last;
};

// The keys that a query sees.
__device__ __forceinline__ Span keys_of(const Info& info, int query) {
    int keys = info.keys, own = query + keys - static_cast<int>(info.queries);
    if (!CAUSAL) {
        return {0, keys - 1};
    }
    return {own - static_cast<int>(info.window) + 1, min(own, keys - 1)};
}

// The queries that see a key. What is behind the last query counts as well: nothing of it is added
// up.
__device__ __forceinline__ Span queries_of(const Info& info, int key) {
    int own = key - static_cast<int>(info.keys) + static_cast<int>(info.queries);
    if (!CAUSAL) {
        return {0, static_cast<int>(info.queries)};
    }
    return {own, min(own + static_cast<int>(info.window) - 1, static_cast<int>(info.queries))};
}

// Which of a thread's sums of a row of `N` columns are among the first `count` columns behind its
// own first one: a bit each. Two of each eight columns are its own.
template <int N>
__device__ __forceinline__ u32 among_first(int count) {
    static_assert(N <= 128, "bits");
    count = min(max(count, 0), N);
    return static_cast<u32>((1ull << (count / 8 * 2 + min(count % 8, 2))) - 1);
}

// Whether a tile needs no mask: the spans of its first and of its last row both have all its
// columns.
__device__ __forceinline__ bool spans(Span of_first, Span of_last, int column, int columns) {
    return of_first.first <= column && of_last.first <= column && of_first.last >= column + columns - 1 &&
           of_last.last >= column + columns - 1;
}
