// Small kernels that use every instruction of the emulator as the PTX ISA says, and each of them wrongly when asked to.
//
//   ./selftest --late=2 ["leading offset"]     prints "ok", or what is wrong
//
// faults.py leaves barriers of csrc's kernels out, which shows that the emulator sees a missing one. This file shows
// that it finds data where the hardware does, and that it knows the rules of the ISA.
//
// Read next: ../test_emulator.py, which knows what each fault has to say.
#include <cstdio>
#include <random>
#include <vector>

#include "ptx/cluster.cuh"
#include "ptx/dmma.cuh"
#include "ptx/memory.cuh"

using namespace device;
using namespace ptx;

static std::string fault;
static bool is(const char *name) { return fault == name; }

// A row-major matrix of small whole numbers, for which every dtype and every order of sums is exact.
template <typename T> struct Matrix {
    int rows, cols;
    std::vector<T> data;
    Matrix(int rows, int cols) : rows(rows), cols(cols), data(rows * cols) {
        std::memset(static_cast<void *>(data.data()), 0xff, data.size() * sizeof(T));
    }
    T &at(int row, int col) { return data[row * cols + col]; }
    const T &at(int row, int col) const { return data[row * cols + col]; }
    Matrix &randomize(unsigned seed) {
        std::mt19937 random(seed);
        for (T &x : data) x = T(from_float<T>(int(random() % 3) - 1));
        return *this;
    }
};
static double value(float x) { return x; }
static double value(double x) { return x; }
static double value(__half x) { return to_float(x); }

// out must be A B, where B is a function of row and column.
template <typename T, typename U, typename Factor>
static void check(const char *name, const Matrix<T> &out, const Matrix<U> &a, Factor b) {
    for (int row = 0; row < out.rows; row++)
        for (int col = 0; col < out.cols; col++) {
            const double x = value(out.at(row, col));
            double sum = 0;
            for (int k = 0; k < a.cols; k++) sum += value(a.at(row, k)) * b(k, col);
            if (x == sum) continue;  // a NaN is not
            char text[96];
            std::snprintf(text, sizeof(text), "%s[%d][%d] is %g, expected %g", name, row, col, x, sum);
            throw std::runtime_error(text);
        }
}

// Ampere: out [32, 16] = A [32, 16] B [16, 16] by two warps of 16 rows each. Rows are 32 bytes. The two vectors of
// a row trade places in every other four rows, so that ldmatrix finds eight rows in different banks. From row 28 on A
// is 0.
constexpr int kRowsOfA = 28;
struct AmpereParams { const __half *a, *b; float *out; };
struct AmpereShared { alignas(128) uint16_t sA[32][16], sB[16][16]; };

static uint32_t vec_offset(int row, int vec) { return row * 32 + (vec ^ row / 4 % 2) * 16; }

static void ampere(AmpereParams p) {
    auto &[sA, sB] = shared_memory<AmpereShared>();
    const int row = threadIdx.x / 2, vec = threadIdx.x % 2, warp_idx = threadIdx.x / 32, lane_idx = threadIdx.x % 32;
    const int shift = is("cp.async from an unaligned address") ? 1 : 0;
    cp_async(shared_address(sA) + vec_offset(row, vec), p.a + row * 16 + vec * 8 + shift,
             row < kRowsOfA || is("cp.async of what is outside"));
    if (row < 16) cp_async(shared_address(sB) + vec_offset(row, vec), p.b + row * 16 + vec * 8, true);
    if (!is("cp.async not committed")) cp_async_commit();
    if (!is("cp.async not awaited")) cp_async_wait<0>();
    if (!is("barrier left out")) __syncthreads();
    uint32_t a[4], b[4];
    const int a_row = warp_idx * 16 + lane_idx % 16, a_vec = lane_idx / 16;
    ldmatrix(a, shared_address(sA) + (is("ldmatrix without the swizzle") ? a_row * 32 + a_vec * 16
                                                                         : vec_offset(a_row, a_vec)));
    const uint32_t b_address = shared_address(sB) + vec_offset(lane_idx % 16, lane_idx / 16);
    if (is("ldmatrix without the transpose")) ldmatrix(b, b_address);
    else ldmatrix_trans(b, is("ldmatrix beyond the end") ? b_address + sizeof(sB) : b_address);
    float d[2][4] = {};
    for (int n = 0; n < 2; n++) mma<__half>(d[n], a, b[2 * n], b[is("fragment of mma") ? 2 * n : 2 * n + 1]);
    for (int n = 0; n < 2; n++)
        for (int i = 0; i < 4; i++)
            p.out[(warp_idx * 16 + lane_idx / 4 + i / 2 * 8) * 16 + n * 8 + lane_idx % 4 * 2 + i % 2] = d[n][i];
}

static void test_ampere() {
    Matrix<__half> a(32, 16), b(16, 16);
    Matrix<float> out(32, 16);
    a.randomize(1), b.randomize(2);
    for (int row = kRowsOfA; row < 32; row++)
        for (int k = 0; k < 16; k++) a.at(row, k) = from_float<__half>(NAN);
    launch(ampere, 1, 64, sizeof(AmpereShared), nullptr, {a.data.data(), b.data.data(), out.data.data()});
    for (int row = kRowsOfA; row < 32; row++)
        for (int k = 0; k < 16; k++) a.at(row, k) = from_float<__half>(0);
    check("ampere", out, a, [&](int k, int col) { return value(b.at(k, col)); });
}

// The product in fp64: out [16, 8] = A [16, 8] B [8, 8].
struct DoubleParams { const double *a, *b; double *out; };
static void doubles(DoubleParams p) {
    const int r = threadIdx.x / 4, c = threadIdx.x % 4;
    const int order = is("fragment of mma in fp64");  // rows before columns, or the other way round
    double a[4], b[2] = {p.b[c * 8 + r], p.b[(c + 4) * 8 + r]}, d[4] = {};
    for (int i = 0; i < 4; i++) a[i] = p.a[(r + (order ? i / 2 : i % 2) * 8) * 8 + c + (order ? i % 2 : i / 2) * 4];
    mma(d, {a[0], a[1], a[2], a[3]}, b);
    for (int i = 0; i < 4; i++) p.out[(r + i / 2 * 8) * 8 + 2 * c + i % 2] = d[i];
}

static void test_doubles() {
    Matrix<double> a(16, 8), b(8, 8), out(16, 8);
    std::mt19937 random(3);
    for (double &x : a.data) x = int(random() % 9) - 4;
    for (double &x : b.data) x = int(random() % 9) - 4;
    launch(doubles, 1, 32, 1024, nullptr, {a.data.data(), b.data.data(), out.data.data()});
    check("doubles", out, a, [&](int k, int col) { return b.at(k, col); });
}

// Blocks that add to a sum in turn. Each stores its index.
struct TurnParams { float *sum; int *turn; uint4 *stored; };
static void turns(TurnParams p) {
    const int turn = blockIdx.x + is("turn that never comes");
    if (threadIdx.x == 0)
        while (load_acquire(p.turn) != turn) {}
    __syncwarp();
    const float x = p.sum[0] * 2 + blockIdx.x;
    if (threadIdx.x > 0) return;
    p.stored[is("a store of two blocks") ? blockIdx.x / 2 : blockIdx.x] = uint4{blockIdx.x};
    red_add(p.sum + is("red_add to an unaligned address"), {x - p.sum[0], 0, 0, 0});
    store_release(p.turn, turn + 1);
}

static void test_turns() {
    alignas(16) float sum[8] = {};
    uint4 stored[6];
    int turn = 0;
    launch(turns, 6, 32, 1024, nullptr, {sum, &turn, stored});
    float expected = 0;
    for (unsigned i = 0; i < 6; i++) {
        expected = expected * 2 + i;
        if (stored[i].x != i) emulator::fail("turns: block %u has stored %u", i, stored[i].x);
    }
    if (sum[0] != expected) emulator::fail("turns: the sum is %g, expected %g", sum[0], expected);
}

// Pairs of blocks: out [blocks, 32] are 32 numbers from the other block of a pair, plus its index.
struct PairShared {
    uint4 mine[8], theirs[8];
    int idx;
    Barrier full, done;
};
static void pair(int *out) {
    auto &shared = shared_memory<PairShared>();
    const int rank = blockIdx.x % 2, bytes = sizeof(shared.mine);
    if (threadIdx.x == 0) {
        shared.idx = blockIdx.x;
        mbarrier_init(shared.full, 1), mbarrier_init(shared.done, is("arrivals of the other block") ? 2 : 1);
        fence_mbarrier_init();
    }
    const uint32_t i = threadIdx.x;
    if (i < 8) shared.mine[i] = {4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3};
    if (!is("proxy fence before a copy left out")) fence_proxy_async();
    __syncwarp();
    if (!is("cluster_sync left out")) cluster_sync();
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(shared.full, is("bytes from the other block") ? bytes / 2 : bytes);
        copy_to_block(shared.theirs, shared.mine, bytes, shared.full, 1 - rank);
    }
    mbarrier_wait(shared.full, 0);
    out[32 * blockIdx.x + i] = reinterpret_cast<int *>(shared.theirs)[i] + load_from_block(shared.idx, 1 - rank);
    __syncwarp();
    if (threadIdx.x == 0) mbarrier_arrive(shared.done, 1 - rank);
    if (!is("end of the other block not awaited")) mbarrier_wait(shared.done, 0);
}

static void test_pairs() {
    std::vector<int> out(6 * 32);
    launch_clusters(false, 2, pair, 6, 32, sizeof(PairShared), nullptr, out.data());
    for (int i = 0; i < 6 * 32; i++)
        if (out[i] != i % 32 + (i / 32 ^ 1)) emulator::fail("pairs: number %d is %d", i, out[i]);
}

// Hopper: out [128, 128] = (Q Kᵀ) V by two warpgroups of 64 rows each. A third one loads Q [128, 64], K [64, 64] and
// V [64, 128], in two panels of 64 columns, by TMA.
struct HopperParams { CUtensorMap q, k, v, out; };
struct HopperShared {
    alignas(1024) uint16_t sQ[2][64][64];
    uint16_t sK[64][64], sV[2][64][64], sO[2][2][64][64];  // sO: of each warpgroup two panels
    Barrier full;
};

static void produce(const HopperParams &p, HopperShared &shared) {
    const int bytes = sizeof(shared.sQ) + sizeof(shared.sK) + sizeof(shared.sV);
    mbarrier_arrive_expect_tx(shared.full, is("bytes to expect") ? bytes / 2 : bytes);
    for (int i = 0; i < 2; i++) tma_load(shared.sQ[i], p.q, shared.full, 0, 64 * i, 0, 0);
    tma_load(shared.sK[is("place of a load") ? 1 : 0], p.k, shared.full, 0, 0, 0, 0);
    for (int i = 0; i < 2; i++)
        tma_load(shared.sV[i], p.v, shared.full, is("coordinates of a load") ? 0 : 64 * i, 0, 0, 0);
}

static void multiply(HopperShared &shared, int consumer, float (&acc_o)[16][4]) {
    float acc_s[8][4];
    uint32_t P[4][4];
    const uint64_t q = make_smem_desc<128>(shared.sQ[consumer]) + (is("start of a descriptor") ? 8 : 0);
    const uint64_t k = is("swizzle of a descriptor") ? make_smem_desc<64>(shared.sK) : make_smem_desc<128>(shared.sK);
    const uint64_t v = make_smem_desc<128>(shared.sV, is("leading offset") ? 0 : sizeof(shared.sV[0]));
    if (!is("wgmma.fence left out")) warpgroup_arrive();
    for (int kk = 0; kk < 4; kk++) wgmma<__half>(acc_s, q + 2 * kk, k + (is("columns of K") ? 0 : 2 * kk), kk > 0);
    warpgroup_commit_batch();
    is("scores not awaited") ? warpgroup_wait<1>(acc_s) : warpgroup_wait<0>(acc_s);
    for (int i = 0; i < 16; i++) P[i / 4][i % 4] = pack<__half>(acc_s[i / 2][i % 2 * 2], acc_s[i / 2][i % 2 * 2 + 1]);
    for (auto &x : acc_o) x[0] = x[1] = x[2] = x[3] = 0;
    warpgroup_arrive();
    for (int kk = 0; kk < 4; kk++)
        wgmma<__half>(acc_o, P[kk], v + kk * (is("rows of V") ? 8 : 16) * 128 / 16);
    warpgroup_commit_batch();
    if (is("P written early")) P[3][0] = 0;
    if (is("out written early")) acc_o[0][0] = 0;
    is("P not named") ? warpgroup_wait<0>(acc_o) : warpgroup_wait<0>(acc_o, P);
}

static void store(const HopperParams &p, HopperShared &shared, int consumer, const float (&acc_o)[16][4]) {
    const int warp_idx = threadIdx.x / 32 % 4, lane_idx = threadIdx.x % 32;
    for (int d = 0; d < 16; d += 2) {
        uint32_t x[4];
        for (int j = 0; j < 4; j++) x[j] = pack<__half>(acc_o[d + j / 2][j % 2 * 2], acc_o[d + j / 2][j % 2 * 2 + 1]);
        const int row = 16 * warp_idx + lane_idx % 16, vec = d % 8 + lane_idx / 16;
        const int place = is("swizzle of stmatrix") ? vec ^ row % 4 : vec ^ row % 8;
        stmatrix(x, shared_address(shared.sO[consumer][d / 8][row]) + place * 16);
    }
    if (!is("proxy fence left out")) fence_proxy_async();
    if (!is("lanes of a store not awaited")) __syncwarp();
    if (lane_idx > 0) return;
    const int row = 16 * warp_idx, from = is("place of a store") ? row / 2 + 1 : row;
    for (int i = 0; i < 2; i++) tma_store(shared.sO[consumer][i][from], p.out, 64 * i, 64 * consumer + row, 0, 0);
    if (!is("store not awaited")) tma_store_wait_read();
}

static void hopper(HopperParams p) {
    auto &shared = shared_memory<HopperShared>();
    if (threadIdx.x == 0) {
        mbarrier_init(shared.full, is("arrivals") ? 2 : 1);
        if (!is("fence of mbarrier_init left out")) fence_mbarrier_init();
    }
    barrier_sync(3, is("threads of a barrier") ? 352 : 384);
    if (threadIdx.x < 128) {
        warpgroup_reg_dealloc<24>();
        if (threadIdx.x == 0) produce(p, shared);
        return;
    }
    is("registers") ? warpgroup_reg_alloc<248>() : warpgroup_reg_alloc<240>();
    const int consumer = threadIdx.x / 128 - 1;
    mbarrier_wait(shared.full, is("phase") ? 1 : 0);
    float acc_o[16][4];
    multiply(shared, consumer, acc_o), store(p, shared, consumer, acc_o);
}

static CUtensorMap encode(Matrix<__half> &x, int box_rows) {
    const cuuint64_t sizes[] = {cuuint64_t(x.cols), cuuint64_t(x.rows), 1, 1};
    const cuuint64_t row_bytes = x.cols * 2, strides[] = {row_bytes, row_bytes * x.rows, row_bytes * x.rows};
    const cuuint32_t box[] = {64, cuuint32_t(box_rows), 1, 1}, steps[] = {1, 1, 1, 1};
    const uintptr_t begin = uintptr_t(x.data.data()) + (is("tensor map of an unaligned tensor") ? 2 : 0);
    CUtensorMap map;
    const CUresult result = cuTensorMapEncodeTiled(
        &map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, reinterpret_cast<void *>(begin), sizes, strides, box, steps,
        CU_TENSOR_MAP_INTERLEAVE_NONE, is("swizzle of a load") ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B,
        CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) throw std::runtime_error("TMA cannot take the tensor");
    return map;
}

static void test_hopper() {
    Matrix<__half> q(128, 64), k(64, 64), v(64, 128), out(128, 128);
    q.randomize(4), k.randomize(5), v.randomize(6);
    Matrix<float> scores(128, 64);
    for (int row = 0; row < 128; row++)
        for (int key = 0; key < 64; key++) {
            scores.at(row, key) = 0;
            for (int d = 0; d < 64; d++) scores.at(row, key) += to_float(q.at(row, d)) * to_float(k.at(key, d));
        }
    launch(hopper, 1, 384, sizeof(HopperShared), nullptr,
           {encode(q, 64), encode(k, is("box of a load") ? 32 : 64), encode(v, 64),
            encode(out, is("box of a store") ? 64 : 16)});
    check("hopper", out, scores, [&](int key, int col) { return value(v.at(key, col)); });
}

int main(int argc, char **argv) try {
    const std::string schedule = argv[1];
    fault = argc > 2 ? argv[2] : "";
    emulator::schedule = {schedule.starts_with("--early")  ? emulator::Mode::kEarly
                          : schedule.starts_with("--late") ? emulator::Mode::kLate
                                                           : emulator::Mode::kRandom,
                          unsigned(std::stoul(schedule.substr(schedule.find('=') + 1)))};
    emulator::gpu.num_sms = 3;
    test_ampere(), test_doubles(), test_turns(), test_pairs(), test_hopper();
    std::puts("ok");
} catch (const std::exception &error) {
    std::puts(error.what());
    return 1;
}
