// wgmma for the emulator: a warp's share of a product m64nNk16, its 16 rows of D (+)= A B, and when it is computed. And
// mma, which looks like such a share.
//
// "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions" of the PTX ISA. A product reads shared memory,
// and A in registers, at any time from its issue to the warp's wait for its group, each warp for itself, and the
// products of a warp in order. Meanwhile its accumulators are NaN. All of A in shared memory counts as read until the
// last warp of the warpgroup has read its rows.
#include <array>
#include <bit>
#include <string_view>
#include <tuple>

#include "block.h"

namespace emulator {

// "Matrix Descriptor": where a matrix of 16-bit elements in shared memory lies.
struct Matrix {
    uint32_t start, leading, stride, row_bytes;

    explicit Matrix(uint64_t bits) {
        auto field = [bits](int first) { return uint32_t(bits >> first & 0x3fff) << 4; };
        start = field(0), leading = field(16), stride = field(32);
        const uint32_t swizzle = bits >> 62;
        row_bytes = 256 >> swizzle;
        if (swizzle == 0) fail("a matrix that is not swizzled is not emulated");
        if (bits & 0x3fff'c000'c000'c000)
            fail("a matrix descriptor with a base offset, or bits that mean nothing: %#llx", 0ull + bits);
        if (start % (8 * row_bytes) >= row_bytes) fail("a matrix at %#x, not in the first row of its pattern", start);
    }

    // "Shared Memory Matrix Layout" and "Strides", of eight elements that follow one another in memory.
    // K-major: rows of M or N, eight of them a pattern, the next eight `stride` further; k is 0 or 8.
    uint32_t k_major(int row, int k) const { return start + row / 8 * stride + row % 8 * row_bytes + k * 2; }
    // MN-major: rows of K, eight of them a pattern, the next eight `stride` further. What does not fit a row of the
    // pattern goes on `leading` further.
    uint32_t mn_major(int k, int n) const {
        const int cols = row_bytes / 2;
        return start + n / cols * leading + n % cols * 2 + k / 8 * stride + k % 8 * row_bytes;
    }

    std::array<uint16_t, 8> read(uint32_t address) const {
        std::array<uint16_t, 8> x;
        std::memcpy(&x, block->shared.at(block->shared.async, swizzled(address, row_bytes), 16), 16);
        return x;
    }
};

template <typename T> float number(uint16_t bits) {
    static const auto table = [] {
        std::vector<float> x(1 << 16);
        for (size_t i = 0; i < x.size(); i++) x[i] = device::to_float(T{uint16_t(i)});
        return x;
    }();
    return table[bits];
}

// "Register Fragments": where element i of a lane's registers lies in the warp's 16 rows, of A and of D alike.
int fragment_row(int lane, int i) { return lane / 4 + i / 2 % 2 * 8; }
int fragment_col(int lane, int i) { return i / 4 * 8 + lane % 4 * 2 + i % 2; }

// "Multiply-and-Accumulate Instruction: mma", m16n8k16.
template <typename T> void multiply(void *(&lanes)[32]) {
    auto lane = [&](int i) -> SmallProduct & { return *static_cast<SmallProduct *>(lanes[i]); };
    auto half = [](const uint32_t *x, int i) { return number<T>(uint16_t(x[i / 2] >> i % 2 * 16)); };
    float a[16][16], b[16][8];
    for (int l = 0; l < 32; l++) {
        for (int i = 0; i < 8; i++) a[fragment_row(l, i)][fragment_col(l, i)] = half(lane(l).a, i);
        for (int i = 0; i < 4; i++) b[i / 2 * 8 + l % 4 * 2 + i % 2][l / 4] = half(lane(l).b, i);
    }
    for (int l = 0; l < 32; l++)
        for (int i = 0; i < 4; i++)
            for (int k = 0; k < 16; k++) lane(l).d[i] += a[fragment_row(l, i)][k] * b[k][fragment_col(l, i)];
}
template void multiply<__half>(void *(&)[32]);
template void multiply<__nv_bfloat16>(void *(&)[32]);

// m16n8k8 in f64.
void multiply_double(void *(&lanes)[32]) {
    auto lane = [&](int i) -> DoubleProduct & { return *static_cast<DoubleProduct *>(lanes[i]); };
    double a[16][8], b[8][8];
    for (int l = 0; l < 32; l++) {
        for (int i = 0; i < 4; i++) a[l / 4 + i % 2 * 8][l % 4 + i / 2 * 4] = lane(l).a[i];
        for (int i = 0; i < 2; i++) b[l % 4 + i * 4][l / 4] = lane(l).b[i];
    }
    for (int l = 0; l < 32; l++)
        for (int i = 0; i < 4; i++)
            for (int k = 0; k < 8; k++) lane(l).d[i] += a[fragment_row(l, i)][k] * b[k][fragment_col(l, i)];
}

using Fragments = std::array<const uint32_t *, 32>;  // of each lane, A in registers

template <typename T> void multiply(Accumulators &d, Product &product, const Fragments &fragments, int warp_idx) {
    const Matrix matrix_b(product.b);
    const int cols = 8 * product.tiles;
    float a[16][16], b[16][256];
    if (product.a_registers) {
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 8; i++)
                a[fragment_row(lane, i)][fragment_col(lane, i)] =
                    number<T>(uint16_t(fragments[lane][i / 2] >> i % 2 * 16));
    } else {
        const Matrix matrix_a(product.a);
        std::array<uint16_t, 8> rows[2][64];  // of eight elements that follow one another in memory
        const int row0 = warp_idx % 4 * 16;
        if (product.is_a_transposed) {
            for (int k = 0; k < 16; k++)
                for (int i = 0; i < 8; i++) rows[k / 8][k % 8 * 8 + i] = matrix_a.read(matrix_a.mn_major(k, 8 * i));
            for (int k = 0; k < 16; k++)
                for (int row = 0; row < 16; row++)
                    a[row][k] = number<T>(rows[k / 8][k % 8 * 8 + (row0 + row) / 8][row % 8]);
        } else {
            for (int k = 0; k < 16; k += 8) {
                for (int row = 0; row < 64; row++) rows[k / 8][row] = matrix_a.read(matrix_a.k_major(row, k));
                for (int row = 0; row < 16; row++)
                    for (int i = 0; i < 8; i++) a[row][k + i] = number<T>(rows[k / 8][row0 + row][i]);
            }
        }
        const size_t hash = std::hash<std::string_view>()({reinterpret_cast<const char *>(rows), sizeof(rows)});
        if (product.a_hash.value_or(hash) != hash) fail("A was written before all warps of the warpgroup had read it");
        product.a_hash = hash;
    }
    if (product.is_b_transposed) {
        for (int k = 0; k < 16; k += 8)
            for (int col = 0; col < cols; col++) {
                const auto x = matrix_b.read(matrix_b.k_major(col, k));
                for (int i = 0; i < 8; i++) b[k + i][col] = number<T>(x[i]);
            }
    } else {
        for (int k = 0; k < 16; k++)
            for (int col = 0; col < cols; col += 8) {
                const auto x = matrix_b.read(matrix_b.mn_major(k, col));
                for (int i = 0; i < 8; i++) b[k][col + i] = number<T>(x[i]);
            }
    }
    for (int row = 0; row < 16; row++) {
        if (!product.accumulate) std::fill_n(d.value[row], cols, 0.f);
        for (int k = 0; k < 16; k++)
            for (int col = 0; col < cols; col++) d.value[row][col] += a[row][k] * b[k][col];
    }
}

// All lanes: each register and the element that it is.
void for_each_register(Accumulators &d, auto act) {
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4 * d.tiles; i++)
            act(d.registers[lane][i / 4][i % 4], d.value[fragment_row(lane, i)][fragment_col(lane, i)]);
}

// Registers are a signaling NaN meanwhile, of which arithmetic makes another one.
constexpr uint32_t kUnderWay = 0x7f812345;

// The registers of a product under way that has the same ones, or new ones.
Accumulators &accumulators_of(Warp &warp, const std::array<Product *, 32> &lanes) {
    const auto [first, tiles] = std::pair(lanes[0]->d, lanes[0]->tiles);
    for (Accumulators &d : warp.accumulators) {
        if (first == d.registers[0] && tiles == d.tiles) return d;
        if (first < d.registers[0] + d.tiles && d.registers[0] < first + tiles)
            fail("wgmma to some of the accumulators of another product under way");
    }
    Accumulators &d = warp.accumulators.emplace_back();
    d.tiles = tiles;
    for (int lane = 0; lane < 32; lane++) d.registers[lane] = lanes[lane]->d;
    for_each_register(d, [](float &x, float &value) { value = x, x = std::bit_cast<float>(kUnderWay); });
    return d;
}

void issue_by_warp(void *(&brought)[32]) {
    std::array<Product *, 32> lanes;
    Fragments a;
    for (int i = 0; i < 32; i++) lanes[i] = static_cast<Product *>(brought[i]), a[i] = lanes[i]->a_registers;
    const Product product = *lanes[0];
    const int warp_idx = threadIdx.x / 32;
    Warp &warp = this_warp();
    if (!warp.may_multiply) fail("wgmma without a wgmma.fence since registers may have been written");

    const uint32_t idx = warp.issued++;
    std::vector<Product> &products = block->products[warp_idx / 4];
    if (idx == products.size()) products.push_back(product);
    auto operands = [](const Product &x) { return std::tuple(x.a, x.b, x.tiles, x.is_half, x.accumulate); };
    if (operands(product) != operands(products[idx])) fail("the warps of a warpgroup issue different products");

    Accumulators &d = accumulators_of(warp, lanes);
    d.end = idx + 1;
    if (a[0]) warp.operands.emplace_back(idx, a[0]);
    if (idx == (warp.groups.empty() ? 0 : warp.groups.back())) warp.is_slow = scheduler->one_in(4);
    auto may_run = [&warp, warp_idx, idx] {  // in order, and when all four warps have issued it
        if (warp.run != idx || (schedule.mode == Mode::kLate && idx >= warp.awaited)) return false;
        const Warp *group = &block->warps[warp_idx / 4 * 4];
        return std::all_of(group, group + 4, [idx](const Warp &other) { return other.issued > idx; });
    };
    scheduler->post({may_run, [&warp, &d, a, warp_idx, idx] {
        Product &product = block->products[warp_idx / 4][idx];
        if (product.is_half) multiply<__half>(d, product, a, warp_idx);
        else multiply<__nv_bfloat16>(d, product, a, warp_idx);
        warp.run++;
    }, warp.is_slow});
}

void issue(Product product) {
    meet("wgmma", &product, issue_by_warp);
    scheduler->pass();
}

// Registers that a wait covers must be among those that it names, or a compiler would use them before it.
struct Wait {
    int pending, count;
    const Registers *named;

    void check(const void *p) const {
        if (std::none_of(named, named + count, [p](const Registers &x) { return p >= x.begin && p < x.end; }))
            fail("wgmma.wait_group is not told of registers that it waits for");
    }
};

void wait_by_warp(void *(&lanes)[32]) {
    const Wait &wait = *static_cast<Wait *>(lanes[0]);
    Warp &warp = this_warp();
    const int groups = int(warp.groups.size()) - wait.pending;
    warp.awaited = groups > 0 ? warp.groups[groups - 1] : 0;
    while (warp.run < warp.awaited)
        scheduler->wait(warp.run, warp.run, ~0u, [] { return "products"; });
    warp.may_multiply = false;
    std::erase_if(warp.operands, [&](const auto &operand) {
        if (operand.first >= warp.awaited) return false;
        wait.check(operand.second);
        return true;
    });
    std::erase_if(warp.accumulators, [&](Accumulators &d) {
        if (d.end > warp.awaited) return false;
        wait.check(d.registers[0]);
        for_each_register(d, [](float &x, float &value) {
            if (std::bit_cast<uint32_t>(x) != kUnderWay) fail("registers were written while a product was under way");
            x = value;
        });
        return true;
    });
}

void wait_group(int pending, const Registers *named, int count) {
    Wait mine{pending, count, named};
    meet("wgmma.wait_group", &mine, wait_by_warp);
}

}  // namespace emulator

namespace ptx {

using namespace emulator;

void warpgroup_arrive() {
    meet("wgmma.fence", nullptr, [](void *(&)[32]) { this_warp().may_multiply = true; });
}
void warpgroup_commit_batch() {
    meet("wgmma.commit_group", nullptr, [](void *(&)[32]) { this_warp().groups.push_back(this_warp().issued); });
}

}  // namespace ptx
