/* A small libnvidia-ml.so.1 whose GPUs are what a file says, read anew at every call.
 *
 * FAKE_NVML names the file. Each line is a key, a blank and a value:
 *   gpus 2                           number of GPUs
 *   temperature 85                   of all GPUs; `1.temperature 90`, as any key, is of GPU 1 alone
 *   nvmlDeviceGetPowerUsage 15       status that a function returns instead of answering
 *   hang.nvmlDeviceGetPowerUsage 1   the call does not return while this is so
 *   xid 79, xid_number 1             an event is sent when its number changes
 *   mig 1                            every GPU is one MIG device, which knows its memory alone
 *   field.161 7, field.161.3 9       value of a field, of all links and of link 3; without it the field
 *                                    is not supported, and field.161.status is a status of its own
 *   field_type 1                     type of all values of fields, by NVML's number
 *   processes 2, process.1.pid 7, process.1.bytes 4096
 *                                    processes of a GPU; one without bytes has an unknown number,
 *                                    and one without an id is the process that asks
 * Functions that drivers of some years ago lack, such as nvmlDeviceGetTemperatureV, are not here.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned int uint;
typedef unsigned long long ull;
typedef void *device;

enum {
    OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, TIMEOUT = 10
};
enum { MIG = 0x100 };

static ull number_of(const char *key, ull otherwise) {
    FILE *file = fopen(getenv("FAKE_NVML") ? getenv("FAKE_NVML") : "/dev/null", "r");
    char name[128];
    ull value;
    if (!file) return otherwise;
    while (fscanf(file, "%127s %llu", name, &value) == 2)
        if (!strcmp(name, key)) otherwise = value;
    fclose(file);
    return otherwise;
}

static uint index_of(device handle) { return ((uint)(size_t)handle & 0xff) - 1; }
static int is_mig(device handle) { return ((size_t)handle & MIG) != 0; }

static ull value_of(device handle, const char *key, ull otherwise) {
    char own[128];
    snprintf(own, sizeof own, "%u.%s", index_of(handle), key);
    return number_of(own, number_of(key, otherwise));
}

static int status_of(device handle, const char *function) {
    char key[128];
    snprintf(key, sizeof key, "hang.%s", function);
    while (number_of(key, 0)) usleep(5000);
    return (int)value_of(handle, function, OK);
}

#define CALL_OF(handle) do { int status = status_of(handle, __func__); if (status) return status; } while (0)
#define CALL() CALL_OF(NULL)
#define PHYSICAL(handle) do { CALL_OF(handle); if (is_mig(handle)) return NOT_SUPPORTED; } while (0)

int nvmlInitWithFlags(uint flags) { CALL(); return OK; }
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int status) { return "an error of the fake"; }

int nvmlDeviceGetCount_v2(uint *count) { CALL(); *count = number_of("gpus", 1); return OK; }

int nvmlDeviceGetHandleByIndex_v2(uint index, device *handle) {
    CALL();
    if (index >= number_of("gpus", 1)) return INVALID_ARGUMENT;
    *handle = (device)(size_t)(index + 1);
    return OK;
}

int nvmlDeviceGetUUID(device handle, char *text, uint length) {
    CALL();
    snprintf(text, length, "%s-%08x-aaaa", is_mig(handle) ? "MIG" : "GPU", index_of(handle));
    return OK;
}

int nvmlDeviceGetHandleByUUID(const char *uuid, device *handle) {
    uint index;
    CALL();
    int found = sscanf(uuid, "MIG-%8x-aaaa", &index) == 1 ? MIG : 0;
    if (!found && sscanf(uuid, "GPU-%8x-aaaa", &index) != 1) return NOT_FOUND;
    if (index >= number_of("gpus", 1)) return NOT_FOUND;
    *handle = (device)(size_t)(found + index + 1);
    return OK;
}

int nvmlDeviceGetIndex(device handle, uint *index) { PHYSICAL(handle); *index = index_of(handle); return OK; }

int nvmlDeviceGetMigMode(device handle, uint *current, uint *pending) {
    CALL();
    *current = *pending = number_of("mig", 0);
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(device handle, uint *count) { CALL(); *count = 7; return OK; }

int nvmlDeviceGetMigDeviceHandleByIndex(device handle, uint index, device *mig) {
    CALL();
    if (index != 2) return NOT_FOUND; /* instances need not be the first ones */
    *mig = (device)((size_t)handle | MIG);
    return OK;
}

int nvmlDeviceGetDeviceHandleFromMigDeviceHandle(device mig, device *handle) {
    CALL();
    if (!is_mig(mig)) return INVALID_ARGUMENT;
    *handle = (device)((size_t)mig & ~(size_t)MIG);
    return OK;
}

struct memory { uint version; ull total, reserved, free, used; };

int nvmlDeviceGetMemoryInfo_v2(device handle, struct memory *memory) {
    CALL();
    memory->total = value_of(handle, "memory_total", 80000000000ull);
    memory->reserved = value_of(handle, "memory_reserved", 600000000);
    memory->used = value_of(handle, "memory_used", 40000000000ull);
    memory->free = memory->total - memory->reserved - memory->used;
    return OK;
}

struct process { uint pid; ull used; uint gpu_instance, compute_instance; };

int nvmlDeviceGetComputeRunningProcesses_v3(device handle, uint *count, struct process *processes) {
    CALL_OF(handle);
    uint room = *count;
    *count = value_of(handle, "processes", 0);
    if (*count > room) return INSUFFICIENT_SIZE;
    for (uint index = 0; index < *count; index++) {
        char key[64];
        snprintf(key, sizeof key, "process.%u.pid", index);
        processes[index].pid = value_of(handle, key, getpid());
        snprintf(key, sizeof key, "process.%u.bytes", index);
        processes[index].used = value_of(handle, key, ~0ull);
    }
    return OK;
}

int nvmlDeviceGetPowerUsage(device handle, uint *milliwatts) {
    PHYSICAL(handle);
    *milliwatts = value_of(handle, "power", 312500);
    return OK;
}

int nvmlDeviceGetEnforcedPowerLimit(device handle, uint *milliwatts) {
    PHYSICAL(handle);
    *milliwatts = value_of(handle, "power_limit", 700000);
    return OK;
}

int nvmlDeviceGetTemperature(device handle, uint sensor, uint *celsius) {
    PHYSICAL(handle);
    *celsius = value_of(handle, "temperature", 55);
    return OK;
}

int nvmlDeviceGetClockInfo(device handle, uint kind, uint *megahertz) {
    PHYSICAL(handle);
    *megahertz = value_of(handle, kind == 1 ? "sm_clock" : "memory_clock", kind == 1 ? 1980 : 2619);
    return OK;
}

int nvmlDeviceGetUtilizationRates(device handle, uint rates[2]) {
    PHYSICAL(handle);
    if (number_of("mig", 0)) return NOT_SUPPORTED;
    rates[0] = value_of(handle, "utilization", 75);
    rates[1] = value_of(handle, "memory_utilization", 50);
    return OK;
}

int nvmlDeviceGetTotalEccErrors(device handle, uint error, uint counter, ull *count) {
    PHYSICAL(handle);
    if (error != 1 || counter != 0) return INVALID_ARGUMENT; /* uncorrected, volatile */
    *count = value_of(handle, "ecc_errors", 0);
    return OK;
}

int nvmlDeviceGetRemappedRows(device handle, uint *corrected, uint *uncorrected, uint *pending, uint *failed) {
    PHYSICAL(handle);
    *corrected = value_of(handle, "corrected_rows", 0);
    *uncorrected = value_of(handle, "uncorrected_rows", 0);
    *pending = value_of(handle, "remap_pending", 0);
    *failed = value_of(handle, "remap_failed", 0);
    return OK;
}

int nvmlDeviceGetCurrentClocksEventReasons(device handle, ull *reasons) {
    PHYSICAL(handle);
    *reasons = value_of(handle, "reasons", 0);
    return OK;
}

int nvmlDeviceGetNvLinkState(device handle, uint link, uint *active) {
    PHYSICAL(handle);
    if (link >= value_of(handle, "nvlinks", 0)) return INVALID_ARGUMENT;
    *active = link != value_of(handle, "nvlink_down", 99);
    return OK;
}

int nvmlDeviceGetNvLinkErrorCounter(device handle, uint link, uint kind, ull *count) {
    PHYSICAL(handle);
    if (kind > 1) return NOT_SUPPORTED; /* as Hopper says of CRC errors */
    *count = value_of(handle, kind ? "nvlink_recoveries" : "nvlink_replays", 0);
    return OK;
}

struct field_value {
    uint field, scope;
    long long timestamp, latency;
    uint type;
    int status;
    union { double number; uint small; ull large; } value;
};

int nvmlDeviceGetFieldValues(device handle, int count, struct field_value *values) {
    PHYSICAL(handle);
    for (struct field_value *value = values; value < values + count; value++) {
        char key[64];
        snprintf(key, sizeof key, "field.%u", value->field);
        ull number = value_of(handle, key, ~0ull);
        snprintf(key, sizeof key, "field.%u.%u", value->field, value->scope);
        number = value_of(handle, key, number);
        snprintf(key, sizeof key, "field.%u.status", value->field);
        value->status = (int)value_of(handle, key, number == ~0ull ? NOT_SUPPORTED : OK);
        value->type = (uint)number_of("field_type", 3);
        value->value.large = ~0ull; /* what lies beyond a narrow value means nothing */
        if (value->type == 0) value->value.number = (double)number;
        else if (value->type == 1) value->value.small = (uint)number;
        else value->value.large = number;
    }
    return OK;
}

int nvmlDeviceGetPcieReplayCounter(device handle, uint *count) {
    PHYSICAL(handle);
    *count = value_of(handle, "pcie_replays", 0);
    return OK;
}

struct event { device handle; ull kind, data; uint gpu_instance, compute_instance; };

int nvmlEventSetCreate(void **set) { CALL(); *set = malloc(1); return OK; }
int nvmlEventSetFree(void *set) { free(set); return OK; }

int nvmlDeviceRegisterEvents(device handle, ull kinds, void *set) {
    PHYSICAL(handle);
    return kinds == 8 ? OK : NOT_SUPPORTED;
}

int nvmlEventSetWait_v2(void *set, struct event *event, uint milliseconds) {
    static ull sent;
    CALL();
    for (uint waited = 0; waited <= milliseconds; waited += 5) {
        ull number = number_of("xid_number", 0);
        if (number && number != sent) {
            sent = number;
            *event = (struct event){.handle = (device)1, .kind = 8, .data = number_of("xid", 0)};
            return OK;
        }
        usleep(5000);
    }
    return TIMEOUT;
}
